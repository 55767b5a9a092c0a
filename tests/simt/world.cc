#include "tests/simt/world.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "tests/simt/block.h"
#include "tests/simt/fiber.h"
#include "tests/simt/sanitizers.h"

thread_local uint3 threadIdx, blockIdx;
thread_local dim3 blockDim, gridDim;

namespace mooncake::simt {

class World::Impl {
 public:
  explicit Impl(Options options) : options_(options), random_(options.seed * 2 + 1) {
    for (int i = 0; i < 8; ++i) draw();
  }

  void add(Launch launch);
  void fault(int rank, uint64_t afterAtomics, uint64_t forNs);
  void mayStop(int rank) { faults_[rank]; }
  Report run();

  // For the running thread.
  Thread& current() { return *running_; }
  bool isInside() const { return running_ != nullptr; }
  void beforeAtomic(const void* address, size_t bytes, Access access, Scope scope, Where where);
  void beforePlain(const void* address, size_t bytes, Access access);
  void wakeSpinning();
  void spin(Where where);
  uint64_t now();
  void syncThreads(Where where, bool vote);
  LaneValues exchange(WarpCall call, unsigned mask, uint64_t value, Where where);
  [[noreturn]] void fail(const std::string& text, Where where);

  bool isKilled(int rank) const;
  void followKilled(int rank);

  MemoryWatch watch;

 private:
  struct Stream {
    std::deque<Launch*> launches;  // that have not ended
    const Launch* last = nullptr;
  };
  struct Fault {
    uint64_t afterAtomics;
    uint64_t forNs;  // kForever: killed
  };
  static constexpr uint64_t kForever = ~uint64_t(0);
  // A rank that a fault has stopped, and the time at which it goes on.
  using Stopped = std::map<int, uint64_t>;

  static void runThread();

  uint64_t draw();
  void startBlocks();
  void startBlock(Launch& launch);
  void endBlocks();
  void endThread(Thread& thread);
  void leaveBarrier(Block& block);
  void setRunnable(Thread& thread);
  void setWaiting(Thread& thread, ThreadState state);
  bool isStopped(const Thread& thread) const {
    return stopped_.contains(thread.block->launch.rank);
  }
  void applyFaults();
  void resume();
  Thread* choose();
  bool isStarved(const Thread& thread) const;
  void chooseVictim();
  bool passTime();
  bool mayRun();
  void yield();
  void switchTo(Thread* to);  // null: back to run()
  void stopRun(std::string problem);
  std::string positions() const;
  std::string isOver() const;

  const Options options_;
  uint64_t random_;
  std::vector<std::unique_ptr<Launch>> launches_;
  std::map<std::pair<int, int>, Stream> streams_;  // by rank and number
  std::map<int, unsigned> resident_;               // blocks of a rank that run
  std::vector<std::unique_ptr<Block>> blocks_;     // that run
  std::vector<Block*> ended_;
  std::vector<Thread*> runnable_, spinning_;
  std::map<int, std::vector<Fault>> faults_;
  std::map<int, uint64_t> atomics_;  // by rank
  Stopped stopped_;

  Fiber main_;
  Thread* running_ = nullptr;
  uint64_t clock_ = 0, lastChange_ = 0;
  unsigned idleTurns_ = 0;
  struct {
    unsigned switches = 0;
    int rank = 0, block = 0, warp = 0;  // -1: any
  } victim_;
  Report report_;
};

namespace {

thread_local World::Impl* world = nullptr;

constexpr const char* kStates[] = {"runnable", "spinning", "__syncthreads", "a warp's call",
                                   "ended"};

uint64_t systemTime() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return uint64_t(time.tv_sec) * 1'000'000'000 + uint64_t(time.tv_nsec);
}

}  // namespace

std::string Where::text() const {
  const char* const slash = std::strrchr(file, '/');
  return std::string(slash ? slash + 1 : file) + ":" + std::to_string(line);
}

// ---- before and after

void World::Impl::add(Launch launch) {
  launches_.push_back(std::make_unique<Launch>(std::move(launch)));
  Launch* const added = launches_.back().get();
  Stream& stream = streams_[{added->rank, added->stream}];
  added->before = stream.last;
  stream.last = added;
  stream.launches.push_back(added);
}

void World::Impl::fault(int rank, uint64_t afterAtomics, uint64_t forNs) {
  faults_[rank].push_back({atomics_[rank] + afterAtomics, forNs});
}

Report World::Impl::run() {
  world = this;
  clock_ = options_.realTime ? systemTime() : 0;
  lastChange_ = clock_;
  while (report_.ok) {
    {
      const sanitizers::Ignored ignored;
      endBlocks();
      startBlocks();
    }
    if (blocks_.empty() || !mayRun()) break;
    yield();
  }
  // No sooner: the caller starts the blocks, so its order is that of launches on other streams, too.
  for (const auto& launch : launches_) sanitizers::acquire(&launch->order);
  {
    const sanitizers::Ignored ignored;
    for (const auto& [rank, until] : stopped_) followKilled(rank);
    blocks_.clear();
    report_.virtualNs = clock_;
  }
  world = nullptr;
  return report_;
}

// Starts the blocks that their streams and devices have room for.
void World::Impl::startBlocks() {
  for (auto& [key, stream] : streams_) {
    if (stream.launches.empty()) continue;
    Launch& launch = *stream.launches.front();
    while (launch.blocksStarted < launch.blocks() &&
           (key.second == kHostStream || resident_[key.first] < options_.residentBlocks))
      startBlock(launch);
  }
}

void World::Impl::startBlock(Launch& launch) {
  auto block = std::make_unique<Block>(launch, launch.blocksStarted++);
  if (launch.stream != kHostStream) ++resident_[launch.rank];
  for (unsigned i = 0; i < launch.threads(); ++i) {
    Thread& thread = block->threads[i];
    thread.block = block.get();
    thread.index = i;
    thread.fiber = std::make_unique<Fiber>(&runThread, block->nameOf(thread));
    setRunnable(thread);
  }
  report_.threads += launch.threads();
  blocks_.push_back(std::move(block));
}

void World::Impl::endBlocks() {
  for (Block* const block : ended_) {
    Launch& launch = block->launch;
    if (launch.stream != kHostStream) --resident_[launch.rank];
    if (++launch.blocksEnded == launch.blocks())
      streams_[{launch.rank, launch.stream}].launches.pop_front();
    std::erase_if(blocks_, [&](const auto& one) { return one.get() == block; });
  }
  ended_.clear();
}

void World::Impl::runThread() {
  Thread& thread = *world->running_;
  Block& block = *thread.block;
  if (block.launch.before) sanitizers::acquire(&block.launch.before->order);
  block.launch.body();
  sanitizers::release(&block.launch.order);
  {
    const sanitizers::Ignored ignored;  // a thread must not end while it ignores
    world->endThread(thread);
  }
  world->yield();
}

void World::Impl::endThread(Thread& thread) {
  Block& block = *thread.block;
  setWaiting(thread, ThreadState::kEnded);
  // The hardware counts a thread that has ended as one that has arrived at every barrier.
  if (--block.alive == 0) {
    ended_.push_back(&block);
  } else if (block.atBarrier == block.alive) {
    leaveBarrier(block);
  }
  lastChange_ = clock_;
}

// ---- which thread goes on

uint64_t World::Impl::draw() {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return random_;
}

void World::Impl::setRunnable(Thread& thread) {
  thread.state = ThreadState::kRunnable;
  thread.listed = runnable_.size();
  runnable_.push_back(&thread);
}

void World::Impl::setWaiting(Thread& thread, ThreadState state) {
  runnable_.back()->listed = thread.listed;
  runnable_[thread.listed] = runnable_.back();
  runnable_.pop_back();
  thread.state = state;
}

void World::Impl::wakeSpinning() {
  lastChange_ = clock_;
  for (Thread* const thread : spinning_) setRunnable(*thread);
  spinning_.clear();
}

bool World::Impl::isKilled(int rank) const {
  const auto found = stopped_.find(rank);
  return found != stopped_.end() && found->second == kForever;
}

void World::Impl::followKilled(int rank) {
  for (const auto& block : blocks_) {
    if (block->launch.rank != rank) continue;
    for (const Thread& thread : block->threads) sanitizers::acquire(&thread.last);
  }
  for (const auto& launch : launches_)
    if (launch->rank == rank) sanitizers::acquire(&launch->order);
}

void World::Impl::applyFaults() {
  const int rank = running_->block->launch.rank;
  const uint64_t atomics = ++atomics_[rank];
  const auto faults = faults_.find(rank);
  if (faults == faults_.end()) return;
  for (const Fault& fault : faults->second) {
    if (fault.afterAtomics == atomics)
      stopped_[rank] = fault.forNs == kForever ? kForever : clock_ + fault.forNs;
  }
}

void World::Impl::resume() {
  std::erase_if(stopped_, [&](const auto& one) { return one.second <= clock_; });
}

bool World::Impl::isStarved(const Thread& thread) const {
  const Block& block = *thread.block;
  return block.launch.rank == victim_.rank &&
         (victim_.block < 0 || int(block.index.x) == victim_.block) &&
         (victim_.warp < 0 || int(thread.index / 32) == victim_.warp);
}

void World::Impl::chooseVictim() {
  const Thread& thread = *runnable_[draw() % runnable_.size()];
  victim_.rank = thread.block->launch.rank;
  victim_.block = draw() % 2 ? int(thread.block->index.x) : -1;
  victim_.warp = draw() % 4 == 0 ? int(thread.index / 32) : -1;
  victim_.switches = unsigned(draw() % (2 * uint64_t(options_.starveFor)));
}

// Returns a thread that can go on, or null.
Thread* World::Impl::choose() {
  constexpr int kTries = 32;
  if (runnable_.empty()) return nullptr;
  if (options_.starveFor && victim_.switches-- == 0) chooseVictim();
  Thread* next = nullptr;
  for (int i = 0; i < kTries; ++i) {
    Thread* const thread = runnable_[draw() % runnable_.size()];
    if (isStopped(*thread)) continue;
    next = thread;
    if (!options_.starveFor || !isStarved(*thread)) break;
  }
  if (next) return next;
  const auto found =
      std::ranges::find_if(runnable_, [&](const Thread* thread) { return !isStopped(*thread); });
  return found == runnable_.end() ? nullptr : *found;
}

// All threads spin or are stopped. Returns false at a hang.
bool World::Impl::passTime() {
  if (options_.realTime) {
    clock_ = systemTime();
    if (++idleTurns_ > 64) {
      const timespec pause{0, 2000};
      ::nanosleep(&pause, nullptr);
    }
  } else {
    if (clock_ - lastChange_ > options_.hangNs) return false;
    clock_ += options_.hangNs / 64;
    resume();
  }
  for (Thread* const thread : spinning_) setRunnable(*thread);
  spinning_.clear();
  return true;
}

// Returns false if no thread will ever go on: only killed ranks are left, or this is a hang.
bool World::Impl::mayRun() {
  const auto isLeft = [&](const auto& block) { return !isKilled(block->launch.rank); };
  if (std::ranges::none_of(blocks_, isLeft)) return false;
  const auto canGoOn = [&](const Thread* thread) { return !isKilled(thread->block->launch.rank); };
  if (std::ranges::any_of(runnable_, canGoOn) || std::ranges::any_of(spinning_, canGoOn))
    return true;
  report_ = {.ok = false, .problem = "deadlock\n" + positions(), .threads = report_.threads};
  return false;
}

// Lets another thread go on. Returns once the caller goes on.
void World::Impl::yield() {
  Thread* next = nullptr;
  {
    const sanitizers::Ignored ignored;
    if (!stopped_.empty()) resume();
    if (!ended_.empty() || !mayRun()) {
      next = nullptr;
    } else {
      while (!(next = choose())) {
        if (passTime()) continue;
        stopRun("hang: nothing has changed for " + std::to_string((clock_ - lastChange_) / 1000) +
                " us");
        break;
      }
    }
    clock_ += 1;
  }
  switchTo(next);
}

void World::Impl::switchTo(Thread* to) {
  Thread* const from = running_;
  if (from == to) return;
  ++report_.switches;
  running_ = to;
  if (to) {
    const dim3 shape = to->block->launch.block;
    threadIdx = {to->index % shape.x, to->index / shape.x % shape.y, to->index / shape.x / shape.y};
    blockIdx = to->block->index;
    blockDim = shape;
    gridDim = to->block->launch.grid;
  }
  if (from && faults_.contains(from->block->launch.rank)) sanitizers::release(&from->last);
  Fiber& source = from ? *from->fiber : main_;
  Fiber::swap(source, to ? *to->fiber : main_, from && from->state == ThreadState::kEnded);
}

void World::Impl::stopRun(std::string problem) {
  if (!report_.ok) return;
  report_.ok = false;
  report_.problem = std::move(problem) + "\n" + positions();
}

void World::Impl::fail(const std::string& text, Where where) {
  {
    const sanitizers::Ignored ignored;
    running_->where = where;
    const std::string thread = running_->block->nameOf(*running_);
    stopRun(text + "\n  " + thread + " of " + running_->block->launch.name + " at " + where.text());
  }
  switchTo(nullptr);
  std::abort();
}

std::string World::Impl::positions() const {
  constexpr int kMost = 12;
  std::map<std::string, int> counts;
  for (const auto& block : blocks_) {
    for (const Thread& thread : block->threads) {
      if (thread.state == ThreadState::kEnded) continue;
      const Launch& launch = block->launch;
      const bool stopped = stopped_.contains(launch.rank);
      ++counts["rank " + std::to_string(launch.rank) + " " + launch.name + " block " +
               std::to_string(block->index.x) + ": " + (stopped ? "stopped, " : "") +
               kStates[int(thread.state)] + " at " + thread.where.text()];
    }
  }
  std::string text;
  int lines = 0;
  for (const auto& [place, count] : counts) {
    if (lines++ < kMost) text += "  " + std::to_string(count) + " x " + place + "\n";
  }
  for (const auto& [key, stream] : streams_) {
    for (const Launch* const launch : stream.launches) {
      const unsigned waiting = launch->blocks() - launch->blocksStarted;
      if (waiting) {
        text += "  rank " + std::to_string(launch->rank) + " " + launch->name + ": " +
                std::to_string(waiting) + " blocks have not begun\n";
      }
    }
  }
  return text;
}

// ---- calls of the running thread

void World::Impl::beforeAtomic(const void* address, size_t bytes, Access access, Scope scope,
                               Where where) {
  const Block& block = *running_->block;
  running_->where = where;
  ++report_.atomics;
  if (block.isShared(address))
    fail("state space: an access to global memory has the address of shared memory", where);
  if (const auto problem = watch.atomic(block.launch.rank, address, access, scope))
    fail(*problem, where);
  applyFaults();
  if (draw() % options_.switchOneIn == 0 || isStopped(*running_)) yield();
  running_->setCounted(address, bytes);
}

void World::Impl::beforePlain(const void* address, size_t bytes, Access access) {
  if (running_->isCounted(address)) return;
  running_->countedBytes = 0;
  watch.plain(running_->block->launch.rank, address, bytes, access);
  if (draw() % options_.switchOneIn == 0) yield();
}

void World::Impl::spin(Where where) {
  running_->where = where;
  setWaiting(*running_, ThreadState::kSpinning);
  spinning_.push_back(running_);
  yield();
}

uint64_t World::Impl::now() {
  clock_ = options_.realTime ? systemTime() : clock_ + 1;
  return clock_;
}

void World::Impl::leaveBarrier(Block& block) {
  block.atBarrier = 0;
  block.votes[++block.turn % 2] = true;
  for (Thread& thread : block.threads)
    if (thread.state == ThreadState::kAtBarrier) setRunnable(thread);
  lastChange_ = clock_;
}

void World::Impl::syncThreads(Where where, bool vote) {
  Thread& thread = *running_;
  Block& block = *thread.block;
  thread.where = where;
  if (!vote) block.votes[block.turn % 2] = false;
  if (thread.index == 0) ++watch.traffic(block.launch.rank).barriers;
  setWaiting(thread, ThreadState::kAtBarrier);
  if (++block.atBarrier == block.alive) leaveBarrier(block);
  yield();
}

LaneValues World::Impl::exchange(WarpCall call, unsigned mask, uint64_t value, Where where) {
  Thread& thread = *running_;
  Block& block = *thread.block;
  Warp& warp = block.warps[thread.index / 32];
  const unsigned bit = 1u << (thread.index % 32);
  thread.where = where;
  if (!(mask & bit)) fail("a lane calls with a mask that lacks it", where);
  Meeting* meeting = nullptr;
  for (Meeting& one : warp.meetings) {
    if (!one.isOpen || !(one.mask & mask) || one.left || (one.arrived & bit)) continue;
    if (one.call != call || one.mask != mask)
      fail("lanes of a warp meet in different calls, the other at " + one.where.text(), where);
    meeting = &one;
  }
  if (!meeting) {
    meeting = std::ranges::find_if(warp.meetings, [](const Meeting& one) { return !one.isOpen; });
    *meeting = {.isOpen = true, .call = call, .mask = mask, .where = where, .values = {}};
  }
  meeting->values.of[thread.index % 32] = value;
  meeting->arrived |= bit;
  setWaiting(thread, ThreadState::kAtWarpCall);
  if (meeting->arrived == mask) {
    const unsigned first = thread.index / 32 * 32;
    for (unsigned lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1) setRunnable(block.threads[first + lane]);
    if (call == WarpCall::kSync) ++warp.turn[__builtin_ctz(mask)];
    lastChange_ = clock_;
  }
  yield();
  const LaneValues values = meeting->values;
  meeting->left |= bit;
  if (meeting->left == mask) meeting->isOpen = false;
  return values;
}

// ---- doors

World::World(Options options) : impl_(std::make_unique<Impl>(options)) {}
World::~World() = default;

void World::own(int rank, const void* begin, size_t bytes, MemoryOwner owner) {
  impl_->watch.own(rank, begin, bytes, owner);
}

void World::launch(int rank, int stream, const std::string& name, dim3 grid, dim3 block,
                   size_t sharedBytes, std::function<void()> body) {
  Launch launch;
  launch.rank = rank;
  launch.stream = stream;
  launch.name = name;
  launch.grid = grid;
  launch.block = block;
  launch.sharedBytes = sharedBytes;
  launch.body = std::move(body);
  impl_->add(std::move(launch));
}

void World::kill(int rank, uint64_t afterAtomics) { stop(rank, afterAtomics, ~uint64_t(0)); }
void World::stop(int rank, uint64_t afterAtomics, uint64_t forNs) {
  impl_->fault(rank, afterAtomics, forNs);
}

void World::mayStop(int rank) { impl_->mayStop(rank); }
bool World::isKilled(int rank) const {
  const sanitizers::Ignored ignored;
  if (!impl_->isKilled(rank)) return false;
  impl_->followKilled(rank);
  return true;
}

Report World::run() { return impl_->run(); }
const Traffic& World::traffic(int rank) { return impl_->watch.traffic(rank); }

void beforeAtomic(const void* address, size_t bytes, Access access, Scope scope, Where where) {
  if (!world || !world->isInside()) return;
  const sanitizers::Ignored ignored;
  world->beforeAtomic(address, bytes, access, scope, where);
}
void afterChange() {
  if (!world || !world->isInside()) return;
  const sanitizers::Ignored ignored;
  world->wakeSpinning();
}
void fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void beforeUnit(const void* address, size_t bytes, Access access) {
  if (!world || !world->isInside()) return;
  const sanitizers::Ignored ignored;
  world->beforePlain(address, bytes, access);
  world->current().setCounted(address, bytes);
}
void beforePlain(const void* address, size_t bytes, Access access) {
  if (!world || !world->isInside() || sanitizers::Ignored::isActive()) return;
  const sanitizers::Ignored ignored;
  world->beforePlain(address, bytes, access);
}
void relax(Where where) {
  const sanitizers::Ignored ignored;
  world->spin(where);
}
uint64_t now() { return world->now(); }
unsigned lane() { return world->current().index % 32; }

bool syncThreads(Where where, bool vote) {
  Block& block = *world->current().block;
  const unsigned turn = block.turn % 2;
  sanitizers::release(&block.barrier[turn]);
  {
    const sanitizers::Ignored ignored;
    world->syncThreads(where, vote);
  }
  sanitizers::acquire(&block.barrier[turn]);
  return block.votes[turn];
}

void syncWarp(unsigned mask, Where where) {
  Thread& thread = world->current();
  Warp& warp = thread.block->warps[thread.index / 32];
  const int first = __builtin_ctz(mask | 1u << 31);
  const char& order = warp.order[warp.turn[first] % 2][first];
  sanitizers::release(&order);
  exchange(WarpCall::kSync, mask, 0, where);
  sanitizers::acquire(&order);
}

LaneValues exchange(WarpCall call, unsigned mask, uint64_t value, Where where) {
  const sanitizers::Ignored ignored;
  return world->exchange(call, mask, value, where);
}

void* staticShared(const void* key, size_t bytes, size_t alignment) {
  const sanitizers::Ignored ignored;
  return world->current().block->staticShared(key, bytes, alignment);
}
void* dynamicShared() { return world->current().block->dynamicShared(); }
void fail(const char* text, Where where) { world->fail(text, where); }

}  // namespace mooncake::simt
