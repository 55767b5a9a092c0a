#include "engine/peers/liveness.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <linux/futex.h>
#include <new>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <utility>

#include "base/log.h"
#include "base/thread.h"

namespace mooncake {
namespace {

// Periods of the beats. Each beat wakes a thread, which costs 30 us and more in a virtual machine.
constexpr auto kBeat = std::chrono::milliseconds(5);
constexpr auto kCalmBeat = std::chrono::milliseconds(20);
constexpr auto kCalmAfter = std::chrono::seconds(1);
constexpr auto kMostPatience = std::chrono::milliseconds(640);
// The threads of a process do not all begin to exit at the same moment.
constexpr auto kFirstConfirm = std::chrono::microseconds(100);
// A busy machine alone may keep a rank from its core for this long.
constexpr auto kLeastSilence = std::chrono::milliseconds(200);
// Most that a late look can add to a peer's silence, beside the period.
constexpr auto kMostLate = 3 * kBeat;
// Bounds of the interval at which peers on other hosts get a beat, unless other traffic shows that
// we live. The interval is a tenth of the failure timeout, or longer with many peers, to keep beats
// cheap.
constexpr auto kLeastInterval = 4 * kBeat;
constexpr auto kMostInterval = std::chrono::milliseconds(1000);
constexpr auto kIntervalPerPeer = std::chrono::milliseconds(10);

std::chrono::milliseconds beatInterval(std::chrono::milliseconds failureTimeout, size_t peers) {
  const auto wanted =
      std::clamp(std::max<std::chrono::milliseconds>(failureTimeout / 10, peers * kIntervalPerPeer),
                 std::chrono::milliseconds(kLeastInterval), kMostInterval);
  return std::clamp(wanted, std::chrono::milliseconds(kBeat),
                    std::max<std::chrono::milliseconds>(failureTimeout / 4, kBeat));
}

// futex_waitv(2) (Linux 5.16) is newer than the headers that we must build with.
constexpr long kFutexWaitv = 449;
constexpr uint32_t kFutex32 = 2;
constexpr size_t kMostWaits = 128;

void wakeAll(const std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// If a peer's beat is overdue, we look into /proc. While a process writes its core dump, which may
// take minutes, its threads stand still and its futexes are not marked yet. We see its last beat up
// to one beat late and look at the next one, so the look comes within two beats.
std::chrono::milliseconds lookAfter(const PeerLife& life) {
  const uint32_t period = life.word ? life.word->period.load(std::memory_order_relaxed) : 0;
  return std::clamp<std::chrono::milliseconds>(std::chrono::milliseconds(period), kBeat, kCalmBeat);
}

// The kernel walks this list when the thread ends. The word may lie at any address.
class RobustList {
 public:
  explicit RobustList(const std::atomic<uint32_t>& word) {
    head_.list.next = &entry_;
    entry_.next = &head_.list;
    head_.futex_offset = reinterpret_cast<intptr_t>(&word) - reinterpret_cast<intptr_t>(&entry_);
    head_.list_op_pending = nullptr;
    ::syscall(SYS_set_robust_list, &head_, sizeof(head_));
  }
  ~RobustList() {
    head_.list.next = &head_.list;  // unlinks the word before this memory is reused
    ::syscall(SYS_set_robust_list, nullptr, sizeof(head_));
  }
  RobustList(const RobustList&) = delete;
  RobustList& operator=(const RobustList&) = delete;

 private:
  robust_list_head head_{};
  robust_list entry_{};
};

}  // namespace

// struct futex_waitv
struct Liveness::FutexWait {
  uint64_t value;
  uint64_t address;
  uint32_t flags;
  uint32_t reserved;
};

namespace {

Liveness::FutexWait waitOn(const std::atomic<uint32_t>& word, uint32_t value) {
  return {value, reinterpret_cast<uintptr_t>(&word), kFutex32, 0};
}

// The ways in which a wait may end where futex_waitv(2) is allowed.
bool isEndOfWait(int error) { return error == EAGAIN || error == ETIMEDOUT || error == EINTR; }

// Returns whether futex_waitv(2) works here. An older kernel does not know it. A sandbox may refuse
// it, or kill the calling thread: so a thread of its own makes the call.
bool canWaitOnMany() {
  bool works = false;
  const auto call = [](void* answer) -> void* {
    const std::atomic<uint32_t> word{1};
    const Liveness::FutexWait differs = waitOn(word, 0);
    const long how = ::syscall(kFutexWaitv, &differs, 1, 0, nullptr, CLOCK_MONOTONIC);
    *static_cast<bool*>(answer) = how >= 0 || isEndOfWait(errno);
    return nullptr;
  };
  pthread_t thread;
  if (::pthread_create(&thread, nullptr, call, &works) != 0) return false;
  ::pthread_join(thread, nullptr);
  return works;
}

}  // namespace

Result<std::unique_ptr<Liveness>> Liveness::create(Arena& arena, Options options) {
  auto block = arena.allocate(sizeof(LifeWord));
  if (!block.ok()) return block.error();
  return std::unique_ptr<Liveness>(new Liveness(std::move(*block), std::move(options)));
}

Liveness::Liveness(ArenaBlock block, Options options)
    : block_(std::move(block)), options_(std::move(options)) {
  options_.failureTimeout =
      std::max<std::chrono::milliseconds>(options_.failureTimeout, kLeastSilence);
  new (block_.data()) LifeWord;
}

Liveness::~Liveness() { stop(); }

void Liveness::stop() {
  std::map<EngineId, Watched> watched;  // its channels are destroyed without the lock
  {
    Lock lock(mutex_);
    stopping_ = true;
    watched.swap(watched_);
    begun_.notify_all();
  }
  wakes_.fetch_add(1, std::memory_order_release);
  wakeAll(wakes_);
  if (thread_.joinable()) thread_.join();
}

Status Liveness::prepare() {
  Lock lock(mutex_);
  if (thread_.joinable() || stopping_ || left_) return {};
  auto thread = startThread(
      "mooncake-live", [this] { run(); }, ThreadName::kItsOwn);
  if (!thread.ok()) return thread.error();
  thread_ = std::move(*thread);
  return {};
}

Status Liveness::begin() {
  MOONCAKE_TRY(prepare());
  Lock lock(mutex_);
  hasBegun_ = true;
  begun_.notify_all();
  return {};
}

// Returns false if the engine ends first.
bool Liveness::awaitBegin() {
  Lock lock(mutex_);
  begun_.wait(mutex_, [this]() REQUIRES(mutex_) { return hasBegun_ || stopping_; });
  return !stopping_;
}

void Liveness::leave() {
  left_.store(true);
  own().holder.store(LifeWord::kGone);
}

uint64_t Liveness::signOf(const Channel& channel) {
  const PeerLife life = channel.peerLife();
  return life.word ? life.word->beats.load(std::memory_order_acquire) : channel.lifeSigns();
}

void Liveness::watch(const EngineId& peer, const std::shared_ptr<Channel>& channel) {
  const PeerLife life = channel->peerLife();
  const PeerProcess process(life.process);
  // The thread sees the peer at its next beat, so no wake-up is needed for each peer of a new
  // group.
  Lock lock(mutex_);
  if (stopping_) return;
  const bool isNew = watched_.find(peer) == watched_.end();
  if (isNew && !life.word) ++remotes_;
  watched_[peer] = {.channel = channel,
                    .life = life,
                    .process = process,
                    .sign = signOf(*channel),
                    .nextLook = Clock::now() + kCalmBeat,
                    .patience = kCalmBeat};
}

void Liveness::unwatch(const EngineId& peer) {
  std::shared_ptr<Channel> last;  // destroyed without the lock
  Lock lock(mutex_);
  auto found = watched_.extract(peer);
  if (!found) return;
  if (!found.mapped().life.word) --remotes_;
  last = std::move(found.mapped().channel);
}

void Liveness::run() {
  if (!awaitBegin()) return;
  waitsOnMany_ = canWaitOnMany();
  const RobustList held(own().holder);
  // FUTEX_WAITERS is set from the start, because the kernel wakes a waiter only if it is set.
  own().holder.store(uint32_t(::syscall(SYS_gettid)) | FUTEX_WAITERS);
  if (left_.load()) leave();  // leave() does this in the other order: one sees the other
  ::pthread_setname_np(::pthread_self(), "mooncake-live");  // shows that the word is held
  std::vector<FutexWait> waits;
  std::vector<Exited> exited;
  std::vector<Silent> silent;
  lastLook_ = nextBeat_ = Clock::now();
  for (;;) {
    setPace();
    own().beats.fetch_add(1, std::memory_order_release);
    waits.assign(1, waitOn(wakes_, wakes_.load(std::memory_order_acquire)));
    {
      Lock lock(mutex_);
      if (stopping_) break;
      look(waits, exited);
      silent = takeSilent();
    }
    for (const Exited& one : exited) options_.onExited(one.peer, one.evidence);
    const bool isNews = !exited.empty() || !silent.empty();
    if (!silent.empty()) options_.onSilent(std::exchange(silent, {}));
    if (!isNews) sleep(waits);
    exited.clear();
  }
  leave();
}

void Liveness::setPace() {
  const auto now = Clock::now();
  if (stirred_.exchange(false, std::memory_order_relaxed)) calmAt_ = now + kCalmAfter;
  period_ = now < calmAt_ ? kBeat : kCalmBeat;
  own().period.store(static_cast<uint32_t>(period_.count()), std::memory_order_relaxed);
}

void Liveness::look(std::vector<FutexWait>& waits, std::vector<Exited>& exited) {
  const auto now = Clock::now();
  const auto passed = std::min<std::chrono::nanoseconds>(now - lastLook_, period_ + kMostLate);
  lastLook_ = now;
  beat(now);
  nextConfirm_ = Clock::time_point::max();
  for (auto next = watched_.begin(); next != watched_.end();) {
    const auto watched = next++;
    const bool lives = listen(watched->second, passed);
    if (!watched->second.life.word) continue;
    const std::atomic<uint32_t>& word = watched->second.life.word->holder;
    const uint32_t holder = word.load(std::memory_order_acquire);
    std::string evidence;
    if (LifeWord::isMarked(holder)) {
      // The kernel woke one waiter only, and that one may be dying, too.
      if (!watched->second.isMarked) wakeAll(word);
      evidence = confirmEnd(watched->second, now);
    } else if (!lives) {
      evidence = lookUp(watched->second, now);
    }
    if (evidence.empty()) {
      if (waits.size() < kMostWaits) waits.push_back(waitOn(word, holder));
      continue;
    }
    exited.push_back({watched->first, std::move(evidence), std::move(watched->second.channel)});
    watched_.erase(watched);
  }
}

// Returns whether there was a new sign of life.
bool Liveness::listen(Watched& watched, std::chrono::nanoseconds passed) const {
  const uint64_t sign = signOf(*watched.channel);
  const bool lives = std::exchange(watched.sign, sign) != sign;
  if (lives) {
    watched.silence = {};
    watched.patience = lookAfter(watched.life);
    watched.nextLook = Clock::now() + watched.patience;
  } else if (sign != 0 || expectsSigns_.load(std::memory_order_relaxed)) {
    watched.silence += passed;
  }
  return lives;
}

// The kernel marks the word when its holder thread ends. If the whole process is ending, all its
// other threads are exiting, too.
std::string Liveness::confirmEnd(Watched& watched, Clock::time_point now) {
  if (!std::exchange(watched.isMarked, true)) {
    watched.nextLook = now;
    watched.patience = kFirstConfirm;
  }
  const auto before = watched.patience;
  if (isLookDue(watched, now)) {
    if (watched.process.isEnding())
      return "its process has exited: the kernel marked its robust futex";
    if (before < kMostPatience && watched.patience == kMostPatience)
      log(LogLevel::kWarning, "liveness", "the liveness thread of process ",
          watched.process.number(),
          " has ended, but the process has not: does a sandbox kill its threads?");
  }
  nextConfirm_ = std::min(nextConfirm_, watched.nextLook);
  return {};
}

// Returns evidence that a peer without beats has ended; empty in most cases.
std::string Liveness::lookUp(Watched& watched, Clock::time_point now) {
  if (!isLookDue(watched, now) || !watched.process.isDumpingCore()) return {};
  return "process " + std::to_string(watched.process.number()) +
         " crashed and is writing its core dump";
}

// On a busy machine all peers beat late, so look less and less often.
bool Liveness::isLookDue(Watched& watched, Clock::time_point now) {
  if (now < watched.nextLook) return false;
  watched.patience = std::min<std::chrono::nanoseconds>(2 * watched.patience, kMostPatience);
  watched.nextLook = now + watched.patience;
  return true;
}

// Reports all silent peers together, and waits for nearly silent peers:
// a rank that receives nothing any more must be seen to accuse all of its peers at once.
std::vector<Liveness::Silent> Liveness::takeSilent() {
  if (left_.load()) return {};  // no peer sends to us any more
  const auto most = options_.failureTimeout;
  const auto margin = 2 * (remotes_ > 0 ? beatInterval(most, remotes_) : period_);
  std::chrono::nanoseconds longest{0};
  bool waits = false;
  for (const auto& [peer, watched] : watched_) {
    longest = std::max(longest, watched.silence);
    waits = waits || (watched.silence < most && watched.silence >= most - margin);
  }
  if (longest < most || (waits && longest < most + margin)) return {};
  std::vector<Silent> silent;
  for (auto& [peer, watched] : watched_) {
    if (watched.silence < most) continue;
    watched.silence = {};
    silent.push_back({peer, watched.channel, watched.sign});
  }
  return silent;
}

void Liveness::beat(Clock::time_point now) {
  if (remotes_ == 0 || now < nextBeat_) return;
  nextBeat_ = now + beatInterval(options_.failureTimeout, remotes_);
  for (const auto& [peer, watched] : watched_) {
    if (!watched.life.word) watched.channel->beat();
  }
}

void Liveness::sleep(std::vector<FutexWait>& waits) {
  const auto until = std::min(Clock::now() + period_, nextConfirm_).time_since_epoch();
  const auto seconds = std::chrono::floor<std::chrono::seconds>(until);
  const timespec when{.tv_sec = seconds.count(),
                      .tv_nsec = std::chrono::nanoseconds(until - seconds).count()};
  if (waitsOnMany_) {
    const long how = ::syscall(kFutexWaitv, waits.data(), waits.size(), 0, &when, CLOCK_MONOTONIC);
    if (how >= 0 || isEndOfWait(errno)) return;
    waitsOnMany_ = false;  // a sandbox became stricter after canWaitOnMany()
  }
  // Without it, deaths are found at the next beat.
  const long how = ::syscall(SYS_futex, waits[0].address, FUTEX_WAIT_BITSET,
                             uint32_t(waits[0].value), &when, nullptr, FUTEX_BITSET_MATCH_ANY);
  if (how < 0 && !isEndOfWait(errno))
    ::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, nullptr);
}

}  // namespace mooncake
