// Processes are killed and stopped at every step of a replacement: newcomers while they are let in,
// members while they take one in, and those that came afterwards. Ranks are taken out by plan, and
// come back or say goodbye. In the end each rank is held by a living process, all of them have seen
// the same operations, and no operation was lost or done twice.
// Messages go on meanwhile: each one between two processes that live comes once, as it was sent. So do
// dispatches and combines: each has the rows of this turn, of all ranks that took part.
// Environment variables:
//   MOONCAKE_TEST_CASES    number of cases; 1 prints the story
//   MOONCAKE_TEST_SEED     seed of the first case
//   MOONCAKE_TEST_AT_ONCE  number of cases that run side by side
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string_view>
#include <thread>
#include <vector>

#include "base/failpoint.h"
#include "collectives/collectives.h"
#include "draw.h"
#include "expert_turns.h"
#include "forked_ranks.h"
#include "group/group_line.h"
#include "message_traffic.h"
#include "removals.h"
#include "wires/sim/sim_transport.h"

namespace mooncake::test {
namespace {

using std::chrono::milliseconds;

constexpr int kMostSize = 5, kMostLives = 8, kMostStints = 8, kMostEntries = 1 << 14;
constexpr milliseconds kFailureTimeout{500};
constexpr auto kHang = std::chrono::seconds(60);
constexpr auto kPatience = std::chrono::seconds(40);
constexpr size_t kEager = 8 << 10;
// A test has two minutes.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kUsualCases = 20;
#else
constexpr uint64_t kUsualCases = 50;
#endif
const JobIdentity kIdentity{.job = "sweep", .mode = "continue", .options = 1};

// ---- a case

// A rank has one process after the other: its lives, counted from 0.
struct Fault {
  int rank, life;
  const char* point;
  uint32_t nth;
  FailpointAction action = FailpointAction::kKill;
  int resumeAfter = -1;  // kStop: ms, -1: never
};

// Network cards are made by libfabric's own provider, on the loopback device.
struct Wire {
  const char* name;
  const char* between;  // wire of two ranks that do not share memory
  bool hasHost;         // some ranks share the memory of one host; each other rank is on its own
};
constexpr Wire kWires[] = {{"shm", "shm", false}, {"tcp", "tcp", false}, {"sim", "sim", false}};
constexpr Wire kMixedWires[] = {{"shm and tcp", "tcp", true}, {"shm and sim", "sim", true}};
// Drawn less often: to open the provider takes a second.
constexpr Wire kCardWires[] = {{"fabric", "fabric", false}, {"shm and fabric", "fabric", true}};

struct Case {
  uint64_t seed;
  int size;
  Wire wire;
  uint32_t hosted;     // a bit per rank: it shares memory with the other ones here
  size_t words;        // of a rank's part
  bool isAtOnePlace;   // newcomers are let in at one place of the program, else at any
  bool onlyOneAsks;    // of the members, at first
  milliseconds pause;  // before a lost rank's next process starts
  std::vector<Fault> faults;
  int ahead = 0;         // most messages of a stream that are under way; 0: there are no messages
  int expertsEvery = 0;  // turns from one dispatch and combine to the next; 0: there are none
  size_t tokens = 0, hidden = 0;
  std::vector<Removal> removals;
};

constexpr const char* kInOperations[] = {"begin", "see-begun", "all-begun", "commit", "ended"};
constexpr const char* kOfNewcomers[] = {"asked",       "connected",  "join-reported",  "told",
                                        "ready",       "part-told",  "successor-made", "renewed",
                                        "term-closed", "old-retired"};
constexpr const char* kOfMembers[] = {"admit",     "join-reported",  "term-closed",     "prepare",
                                      "part-told", "successor-made", "successor-ready", "close",
                                      "moved",     "renewed",        "old-retired"};
constexpr const char* kOfFlushes[] = {"join", "report", "tell", "decide", "act", "acted", "park"};
constexpr const char* kOfMessages[] = {"message-announced", "message-fetch", "message-fetched",
                                       "message-acknowledged"};
constexpr const char* kOfExperts[] = {"ep-take", "put-data"};
constexpr const char* kOfCardExperts[] = {"ep-take", "put-data", "write-data", "end-writes"};
constexpr const char* kOfLeavers[] = {
    "leaves-early", "prepare", "successor-made", "successor-ready", "wished", "close",
    "moved",        "renewed", "old-retired",    "leave",           "ready"};

// Puts some faults at other points.
template <size_t N>
void drawPoints(Draw& draw, Case& c, const char* const (&points)[N]) {
  for (Fault& fault : c.faults) {
    // If two members of four were lost at once, the rest would have no quorum.
    const bool canBeAtOnce = &fault != &c.faults.front() && fault.life == 0;
    if (!draw.chance(20) || (canBeAtOnce && c.size < 5)) continue;
    fault.point = draw.oneOf(points);
    fault.nth = 1 + uint32_t(draw.below(60));
  }
}

void drawMessages(Draw& draw, Case& c) {
  if (draw.chance(30)) return;
  constexpr int kAhead[] = {1, 3, 12};
  c.ahead = draw.oneOf(kAhead);
  drawPoints(draw, c, kOfMessages);
}

void drawExperts(Draw& draw, Case& c) {
  if (draw.chance(50)) return;
  constexpr int kEvery[] = {1, 2, 5};
  constexpr size_t kTokens[] = {2, 8, 40}, kHidden[] = {64, 1000, 3000};
  c.expertsEvery = draw.oneOf(kEvery);
  c.tokens = draw.oneOf(kTokens);
  c.hidden = draw.oneOf(kHidden);
  const std::string_view between = c.wire.between;
  between == "sim" || between == "fabric" ? drawPoints(draw, c, kOfCardExperts)
                                          : drawPoints(draw, c, kOfExperts);
}

void drawRemovals(Draw& draw, Case& c) {
  // The experts' group is made of the series of the last operation, also if that has ended with it, and
  // a rank that was taken out behind that operation does not come to make it.
  if (draw.chance(40) || c.expertsEvery > 0) return;
  c.removals = drawRemovals(draw, c.size);
  uint32_t leavers = 0;
  bool hasGoodbyes = false;
  for (const Removal& one : c.removals) {
    leavers |= one.leavers;
    hasGoodbyes = hasGoodbyes || one.saysGoodbye;
  }
  const int first = c.faults.front().rank;
  for (Fault& fault : c.faults) {
    if (draw.chance(50) && (leavers >> fault.rank & 1)) {
      fault.point = draw.oneOf(kOfLeavers);
      fault.nth = 1 + uint32_t(draw.below(2));
    }
    // Removals bring members to these points while no rank is lost yet, so two could be lost at once.
    const bool canBeAtOnce = &fault != &c.faults.front() && fault.life == 0;
    if (canBeAtOnce && (c.size < 5 || hasGoodbyes)) {
      fault.rank = first;
      fault.life = c.faults.size() > 2 ? 2 : 1;
    }
  }
}

// At most two ranks are gone at a time, so that most are always there.
Case drawCase(uint64_t seed) {
  Draw draw(mix(seed + 0x9e3779b97f4a7c15));
  Case c{.seed = seed, .size = 4 + draw.below(kMostSize - 3)};
  c.wire = draw.oneOf(kWires);
  constexpr size_t kWords[] = {8, 100, 1'000, 9'000};
  c.words = draw.oneOf(kWords);
  c.isAtOnePlace = draw.chance(50);
  c.onlyOneAsks = draw.chance(50);
  c.pause = milliseconds(draw.chance(50) ? 0 : draw.below(60));
  const int first = draw.below(c.size);
  c.faults.push_back({first, 0, draw.oneOf(kInOperations), 3 + uint32_t(draw.below(20))});
  const auto strike = [&](int rank, int life, const char* point, uint32_t nth) {
    Fault fault{rank, life, point, nth};
    const bool hasStop = std::ranges::any_of(
        c.faults, [](const Fault& one) { return one.action == FailpointAction::kStop; });
    if (!hasStop && draw.chance(40)) {
      constexpr int kWhens[] = {-1, -1, 20, 100, 300, 460, 540, 800};
      fault.action = FailpointAction::kStop;
      fault.resumeAfter = draw.oneOf(kWhens);
    }
    c.faults.push_back(fault);
  };
  const bool both = c.size == kMostSize;
  const bool isNewcomer = draw.chance(50);
  if (both || isNewcomer) {
    const char* point = draw.oneOf(kOfNewcomers);
    strike(first, 1, point, 1 + uint32_t(draw.below(3)));
  }
  if (both || !isNewcomer) {
    const int other = (first + 1 + draw.below(c.size - 1)) % c.size;
    if (draw.chance(70)) {
      const char* point = draw.oneOf(kOfMembers);
      strike(other, 0, point, 1 + uint32_t(draw.below(3)));
    } else {
      const char* point = draw.oneOf(kOfFlushes);
      strike(other, 0, point, 1 + uint32_t(draw.below(8)));
    }
  }
  Draw more(mix(seed + 0x6a09e667f3bcc909));  // the rest of the case stays as it is without this
  drawMessages(more, c);
  if (more.chance(45)) c.wire = more.chance(80) ? more.oneOf(kMixedWires) : more.oneOf(kCardWires);
  drawExperts(more, c);
  while (c.wire.hasHost && std::popcount(c.hosted) < 2)
    c.hosted = uint32_t(more.below((1 << c.size) - 1));
  Draw last(mix(seed + 0xbb67ae8584caa73b));
  drawRemovals(last, c);
  return c;
}

std::string describe(const Case& c) {
  std::ostringstream text;
  text << "MOONCAKE_TEST_CASES=1 MOONCAKE_TEST_SEED=" << c.seed << ": " << c.size << " ranks, "
       << c.wire.name << ", " << c.words << " words, newcomers enter "
       << (c.isAtOnePlace ? "at one place" : "anywhere")
       << (c.onlyOneAsks ? ", one member asks" : "") << ", after " << c.pause.count() << " ms";
  if (c.ahead > 0) text << ", up to " << c.ahead << " messages under way";
  if (c.expertsEvery > 0)
    text << ", experts every " << c.expertsEvery << " turns (" << c.tokens << " tokens of "
         << c.hidden << ")";
  if (c.wire.hasHost) text << ", host of ranks " << std::hex << c.hosted << std::dec;
  text << ';';
  for (const Fault& fault : c.faults) {
    text << " rank " << fault.rank << '.' << fault.life;
    if (fault.action == FailpointAction::kKill) text << " is killed";
    if (fault.action == FailpointAction::kStop)
      text << " is stopped"
           << (fault.resumeAfter < 0 ? "" : " for " + std::to_string(fault.resumeAfter) + " ms");
    text << " at " << fault.point << " #" << fault.nth << ';';
  }
  for (const Removal& one : c.removals) text << describe(one);
  return text.str();
}

// ---- a process

struct Entry {
  uint64_t turn, checksum;
  uint32_t contributors;  // a bit per rank
  uint32_t there, back;   // the same of the dispatch and of the combine
  bool isFirst;           // of the process since it has come, or has come back
};

struct Life {
  std::atomic<uint32_t> endpointBytes;  // 0: not there yet
  std::byte endpoint[1024];
  std::atomic<int> entries;
  std::atomic<bool> isIn;
  std::atomic<ErrorCode> standing;  // at its end
  Entry log[kMostEntries];
  char broken[400];  // the first error
  TrafficLog traffic;
  std::atomic<bool> isDone;      // its messages have ended well
  std::atomic<bool> isChanging;  // it has called for a removal, which may still come
  std::atomic<bool> hasLeft;     // it was taken out and has said goodbye
};

struct CaseMemory {
  StoreMemory store;
  std::atomic<bool> ends;
  std::atomic<bool> mayEnd;  // no removal is called for any more
  std::atomic<bool> isDead[kMostSize][kMostLives];
  Life lives[kMostSize][kMostLives];
};

// A rank's part of an allgather: a head, then words that follow from it.
struct Head {
  uint64_t rank, life, count, turn, ready, ends;
};
constexpr size_t kHead = sizeof(Head) / sizeof(uint64_t);

EngineOptions engineOptions(std::vector<std::string> wires, uint64_t seed, std::string name) {
  EngineOptions options{
      .jobKey = Bytes(32, std::byte{7}), .logName = std::move(name), .arenaBytes = size_t(1) << 28};
  options.env.transports = std::move(wires);
  options.env.hostIp = "127.0.0.1";
  options.env.failureTimeout = kFailureTimeout;
  options.env.simSeed = seed;
  options.env.fabricProvider = "tcp;ofi_rxm";
  options.env.fabricDevices = {"127.0.0.1"};
  return options;
}

// Returns the reason why this machine has no such wire; empty: it has. An engine has threads, so a
// child tries it.
std::string lackOf(const char* wire) {
  struct Reason {
    char text[300];
  };
  const SharedWithChildren<Reason> reason;
  ForkedChild child([&] {
    const auto engine = Engine::create(engineOptions({wire}, 1, "a try"));
    if (!engine.ok())
      std::snprintf(reason->text, sizeof(reason->text), "%s", engine.error().message.c_str());
  });
  while (child.look() != ForkedChild::Event::kEnded)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return reason->text;
}

class Process {
 public:
  Process(const Case& c, int rank, int life, CaseMemory& memory)
      : case_(c), rank_(rank), life_(life), memory_(memory), log_(memory.lives[rank][life]) {}

  void run() {
    if (life_ > 0) arm();
    const Status status = life_ == 0 ? begin() : join();
    if (status.ok()) {
      log_.isIn = true;
      if (life_ == 0) awaitBeginning();
      if (life_ == 0) arm();
      work();
    } else {
      broken("could not begin: " + status.error().message, status.code());
    }
    hasEnded_ = true;
    if (asker_.joinable()) asker_.join();
    if (remover_.joinable()) remover_.join();
    if (!line_) return;
    if (traffic_ && log_.standing == ErrorCode::kOk && !hasLeft_) endMessages();
    if (experts_) experts_->close();
    line_->settle(Deadline::after(std::chrono::seconds(5)));
    line_->stop();
    if (traffic_ && !traffic_->close()) broken("a thread stays in a message", ErrorCode::kTimeout);
    line_->current()->leave(Deadline::after(std::chrono::seconds(5)));
    if (!hasLeft_) return;
    job_->leave();
    job_->engine().leave({Farewell::How::kDestroyed, ""});
    log_.hasLeft = true;
  }

 private:
  void broken(const std::string& text, ErrorCode code) {
    log_.standing = code;
    std::snprintf(log_.broken, sizeof(log_.broken), "%s", text.c_str());
  }

  void endMessages() {
    const std::string missing = traffic_->finish(Deadline::after(kHang / 3));
    const Status usable = line_->current()->usable();
    log_.standing = usable.code();
    if (!usable.ok()) {
      if (!isOut(usable.code())) broken(usable.error().message, usable.code());
    } else if (!missing.empty()) {
      broken(missing, ErrorCode::kTimeout);
    } else if (log_.traffic.failed[0]) {
      broken(log_.traffic.failed, ErrorCode::kInvalidArgument);
    } else {
      log_.isDone = true;
    }
  }

  // A job that has not begun on all ranks ends with the loss of one, and has no newcomers.
  void awaitBeginning() const {
    const Deadline deadline = Deadline::after(kPatience);
    const auto isIn = [&](int r) { return memory_.lives[r][0].isIn.load(); };
    for (int r = 0; r < case_.size && !deadline.passed(); r += isIn(r)) {
      if (!isIn(r)) std::this_thread::sleep_for(milliseconds(1));
    }
  }

  void arm() const {
    for (const Fault& fault : case_.faults) {
      if (fault.rank == rank_ && fault.life == life_)
        armFailpoint(fault.point, fault.nth, fault.action);
    }
  }

  // Messages never pause. With the usual odds all connections together would break ten times a
  // second, and with each break a dispatch begins anew.
  Result<std::shared_ptr<Engine>> makeEngine(std::vector<std::string> wires) const {
    if (case_.ahead > 0 && case_.expertsEvery > 0) defaultSimOptions().breakOdds = 5000;
    return Engine::create(
        engineOptions(std::move(wires), case_.seed,
                      "rank " + std::to_string(rank_) + "." + std::to_string(life_)));
  }

  std::vector<std::string> wires() const {
    std::vector<std::string> wires = {case_.wire.between};
    if (case_.hosted >> rank_ & 1) wires.insert(wires.begin(), "shm");
    return wires;
  }

  void publish(const Engine& engine) {
    const Bytes endpoint = engine.endpoint();
    std::copy(endpoint.begin(), endpoint.end(), log_.endpoint);
    log_.endpointBytes.store(uint32_t(endpoint.size()), std::memory_order_release);
  }

  GroupOptions groupOptions() const {
    GroupOptions options{
        .name = "sweep", .rank = rank_, .size = case_.size, .mailboxBytes = kMailboxBytes};
    options.env.eagerBytes = kEager;
    return options;
  }

  Status begin() {
    auto engine = makeEngine(wires());
    if (!engine.ok()) return engine.status();
    publish(**engine);
    ForkedStore store(memory_.store, std::vector<bool>(size_t(case_.size)));
    auto options = groupOptions();
    options.identity = kIdentity;
    auto group = Group::create(*engine, store, events_->with(std::move(options), 1),
                               Deadline::after(kPatience));
    if (!group.ok()) return group.status();
    engine->reset();
    job_ = (*group)->membership();
    return startLine(std::move(*group), false);
  }

  std::vector<Bytes> members() const {
    std::vector<Bytes> found;
    for (int r = 0; r < case_.size; ++r) {
      for (int life = 0; life < kMostLives; ++life) {
        const Life& one = memory_.lives[r][life];
        const uint32_t bytes = one.endpointBytes.load(std::memory_order_acquire);
        if (bytes > 0 && !memory_.isDead[r][life] && !(r == rank_ && life == life_))
          found.emplace_back(one.endpoint, one.endpoint + bytes);
      }
    }
    std::ranges::shuffle(found, std::mt19937_64(case_.seed + size_t(life_)));
    return found;
  }

  Status join() {
    events_->begin(0);
    const Deadline deadline = Deadline::after(kPatience);
    while (!job_) {
      auto engine = makeEngine(wires());
      if (!engine.ok()) return engine.status();
      publish(**engine);
      auto joined = Membership::join(*engine,
                                     {.identity = kIdentity,
                                      .members = members(),
                                      .rank = rank_,
                                      .size = case_.size,
                                      .failureTimeout = kFailureTimeout},
                                     deadline.earlier(Deadline::after(3 * kFailureTimeout)));
      if (joined.ok()) {
        job_ = *joined;
      } else if (joined.error().code == ErrorCode::kRefused || deadline.passed()) {
        return joined.status();
      }
    }
    auto group = makeAlone(events_->with(groupOptions(), 0));
    if (!group.ok()) return group.status();
    MOONCAKE_TRY(startLine(std::move(*group), true));
    return line_->join(deadline);
  }

  // A group that has this process alone. Any thread.
  Result<std::unique_ptr<Group>> makeAlone(GroupOptions options) {
    std::lock_guard lock(making_);
    if (!alone_) {
      auto inproc = makeEngine({"inproc"});
      if (!inproc.ok()) return inproc.error();
      auto alone = Membership::start(
          *inproc,
          {.rank = rank_, .peers = std::vector<std::shared_ptr<Peer>>(size_t(case_.size))});
      if (!alone.ok()) return alone.error();
      alone_ = *alone;
    }
    return Group::createWithin(alone_, std::move(options), Deadline::after(kPatience));
  }

  Status startLine(std::unique_ptr<Group> first, bool isNewcomer) {
    GroupOptions series = groupOptions();
    for (int r = 0; r < case_.size; ++r) series.jobRanks.push_back(r);
    line_ = std::make_unique<GroupLine>(
        job_, std::move(first), events_,
        GroupLine::Options{
            .group = std::move(series),
            .identity = "line of the sweep",
            .isNewcomer = isNewcomer,
            .onDue =
                [this] {
                  std::lock_guard lock(operation_);
                  line_->moveOn();
                },
            .onMove =
                [this](Group& to, const std::vector<bool>& stays) {
                  if (traffic_) traffic_->move(to, stays);
                },
            .makeAlone = [this](GroupOptions options) { return makeAlone(std::move(options)); }});
    if (case_.expertsEvery > 0) {
      experts_ = std::make_unique<ExpertTurns>(
          ExpertTurns::Options{case_.seed, rank_, life_, case_.size, case_.tokens, case_.hidden});
    }
    if (case_.ahead > 0) {
      traffic_ = std::make_unique<MessageTraffic>(
          MessageTraffic::Options{case_.seed, rank_, life_, case_.size, case_.ahead}, log_.traffic);
      if (!isNewcomer) traffic_->begin(*line_->current());
    }
    return line_->start();
  }

  std::vector<int> newcomers(uint64_t ready) const {
    std::vector<int> ranks;
    for (int r = 0; r < case_.size; ++r) {
      if (ready >> r & 1) ranks.push_back(r);
    }
    return ranks;
  }
  uint64_t ready() const {
    uint64_t ready = 0;
    for (int r = 0; r < case_.size; ++r) ready |= uint64_t(line_->readyKey(r) != 0) << r;
    return ready;
  }
  void recover(uint64_t ready) {
    const auto dropped =
        line_->recover(newcomers(ready), Deadline::after(milliseconds(300)),
                       Deadline::after(std::chrono::seconds(10)), GroupLine::Unready::kIsDropped);
    if (dropped.ok() || dropped.error().code == ErrorCode::kTimeout || isRefused(dropped.status()))
      return;
    failed_ = true;
    log_.standing = dropped.error().code;
    if (!isOut(dropped.error().code))
      broken("recover: " + dropped.error().message, dropped.error().code);
  }
  static bool isOut(ErrorCode code) {
    return code == ErrorCode::kEvicted || code == ErrorCode::kMinority;
  }
  // The error of each call of a rank that was taken out.
  static bool isRefused(const Status& status) {
    if (status.code() != ErrorCode::kRefused) return false;
    const std::string& message = status.error().message;
    return message.find("invalid state") != std::string::npos &&
           message.find("rank is not active") != std::string::npos;
  }

  // Before the operation of a turn.
  void takeOutBefore(uint64_t turn) {
    for (const Removal& removal : case_.removals) {
      if (removal.turn != turn || !(removal.callers >> rank_ & 1) || failed_) continue;
      log_.isChanging = true;
      settledAt_ = 0;
      if (memory_.mayEnd) {
        log_.isChanging = false;
      } else if (removal.isBeside && !(removal.leavers >> rank_ & 1)) {
        if (remover_.joinable()) remover_.join();
        isRemoving_ = true;
        remover_ = std::thread([this, removal] {
          takeOut(removal);
          isRemoving_ = false;
        });
      } else {
        takeOut(removal);
      }
    }
  }
  void takeOut(const Removal& removal) {
    const Status removed =
        line_->remove(ranksIn(removal.leavers), Deadline::after(std::chrono::seconds(10)));
    const ErrorCode code = removed.code();
    const bool isOwn = removal.leavers >> rank_ & 1;
    if (removed.ok() && isOwn && !line_->isRemoved()) {
      failed_ = true;
      return broken("it has taken itself out and is in", ErrorCode::kInvalidArgument);
    }
    if (removed.ok() || code == ErrorCode::kTimeout || isRefused(removed)) return;
    if (code == ErrorCode::kRefused &&
        removed.error().message.find("another change") != std::string::npos)
      return;
    failed_ = true;
    log_.standing = code;
    if (!isOut(code)) broken("remove: " + removed.error().message, code);
  }
  // The last removal of this rank before that turn.
  const Removal& removalBefore(uint64_t turn) const {
    const Removal* last = &case_.removals.front();
    for (const Removal& removal : case_.removals) {
      if ((removal.leavers >> rank_ & 1) && removal.turn <= turn) last = &removal;
    }
    return *last;
  }
  // This rank was taken out before the operation of that turn. Returns whether it is in again.
  bool comeBack(uint64_t turn) {
    const int self[] = {rank_};
    if (const Status own = line_->remove({self, self + 1}, Deadline::after(kPatience)); !own.ok())
      broken("it was taken out, and to take itself out fails: " + own.error().message, own.code());
    const int next = (rank_ + 1) % case_.size;
    if (!isRefused(line_->remove({next}, Deadline::after(kPatience))) ||
        !isRefused(line_->recover({next}, Deadline::after(kPatience), Deadline::after(kPatience))
                       .status()))
      broken("it was taken out, and may change the group", ErrorCode::kInvalidArgument);
    if (log_.broken[0]) return false;
    if (experts_) experts_->close();
    const Removal& removal = removalBefore(turn);
    std::this_thread::sleep_for(removal.away);
    hasLeft_ = removal.saysGoodbye;
    if (hasLeft_) return false;
    const Status joined = line_->join(Deadline::after(kPatience));
    if (!joined.ok()) {
      log_.standing = joined.code();
      if (!isOut(joined.code()))
        broken("it does not come back: " + joined.error().message, joined.code());
      return false;
    }
    ++stint_;
    last_.clear();
    return true;
  }

  void ask() {
    const auto began = Clock::now();
    while (!hasEnded_ && !failed_) {
      const bool isTurn =
          !case_.onlyOneAsks || rank_ == 1 || Clock::now() - began > kFailureTimeout;
      const uint64_t waits = isTurn ? ready() : 0;
      if (waits != 0) recover(waits);
      std::this_thread::sleep_for(milliseconds(1));
    }
  }

  // Operations until the test says so, each in one series.
  void work() {
    if (!case_.isAtOnePlace) asker_ = std::thread([this] { ask(); });
    uint64_t turn = 0;
    for (uint64_t count = 1; !failed_; ++count) {
      const uint64_t waits = ready();
      takeOutBefore(turn);
      if (failed_) return;
      const Head head{uint64_t(rank_), life(), count, turn, waits, memory_.ends};
      std::vector<uint64_t> all;
      uint32_t contributors = 0;
      const Status status = gather(head, all, contributors);
      if (line_->isRemoved() && isRefused(status)) {
        if (!comeBack(turn)) return;
        turn = count = 0;
        continue;
      }
      if (!status.ok()) {
        log_.standing = status.code();
        if (!isOut(status.code())) broken(status.error().message, status.code());
        return;
      }
      Head heads{};
      const std::string wrong = look(all, contributors, heads);
      if (!wrong.empty())
        return broken("turn " + std::to_string(heads.turn) + ": " + wrong,
                      ErrorCode::kInvalidArgument);
      turn = heads.turn + 1;
      uint32_t there = 0, back = 0;
      if (experts_ && heads.turn % uint64_t(case_.expertsEvery) == 0) {
        std::vector<uint64_t> lives;
        for (int r = 0; r < case_.size; ++r) lives.push_back(last_[size_t(r)].first);
        const auto ended = experts_->turn(*ranIn_, turn, lives, Deadline::after(kHang / 3));
        if (!ended.status.ok()) {
          log_.standing = ended.status.code();
          if (!isOut(ended.status.code()))
            broken("experts: " + ended.status.error().message, ended.status.code());
          return;
        }
        if (!ended.wrong.empty())
          return broken("turn " + std::to_string(turn) + ": " + ended.wrong,
                        ErrorCode::kInvalidArgument);
        there = ended.there;
        back = ended.back;
        tookPart_ = there & back;
      } else {
        tookPart_ = ~0u;
      }
      const int at = log_.entries.load();
      if (at == kMostEntries) return broken("too many operations", ErrorCode::kExhausted);
      uint64_t checksum = 0;
      for (const uint64_t word : all) checksum = mix(checksum ^ word);
      log_.log[at] = {turn, checksum, contributors, there, back, count == 1};
      log_.entries.store(at + 1, std::memory_order_release);
      noteSettled(at);
      if (heads.ends) return;
      if (case_.isAtOnePlace && heads.ready) recover(heads.ready & ~uint64_t(contributors));
      std::this_thread::sleep_for(std::chrono::microseconds(500));
    }
  }

  // A removal that this rank has called for happens at the latest behind the next operation.
  void noteSettled(int at) {
    if (!log_.isChanging || isRemoving_) return;
    if (settledAt_ == 0) settledAt_ = at + 5;
    if (at >= settledAt_) log_.isChanging = false;
  }

  // Of this process, since it has come or come back.
  uint64_t life() const { return uint64_t(life_ * kMostStints + stint_); }

  Status gather(const Head& head, std::vector<uint64_t>& all, uint32_t& contributors) {
    const size_t words = kHead + case_.words;
    const std::vector<uint64_t> mine = partOf(head);
    std::lock_guard lock(operation_);
    for (;;) {
      const auto group = line_->current();
      all.assign(words * size_t(case_.size), ~uint64_t(0));
      std::vector<Span> outputs;
      for (size_t r = 0; r < size_t(case_.size); ++r)
        outputs.push_back(std::as_writable_bytes(std::span(all).subspan(r * words, words)));
      const Status status = allgather(*group, std::as_bytes(std::span(mine)), outputs,
                                      DType::kUInt64, Deadline::after(kPatience));
      if (status.code() == ErrorCode::kMoved) {
        if (line_->moveOn() != group) continue;
        return {ErrorCode::kInvalidArgument, "the series has ended, and no other follows"};
      }
      if (!status.ok()) return status;
      for (const int r : group->lastView->active) contributors |= 1u << r;
      ranIn_ = group;
      return {};
    }
  }

  std::vector<uint64_t> partOf(const Head& head) const {
    std::vector<uint64_t> words = {head.rank, head.life,  head.count,
                                   head.turn, head.ready, head.ends};
    const uint64_t key = mix(case_.seed ^ mix(head.rank * 100 + head.life) ^ mix(head.count));
    for (size_t i = 0; i < case_.words; ++i) words.push_back(mix(key + i));
    return words;
  }

  // Returns the first fault of the parts. `heads`: the largest of each.
  std::string look(const std::vector<uint64_t>& all, uint32_t contributors, Head& heads) {
    const size_t words = kHead + case_.words;
    for (size_t r = 0; r < size_t(case_.size); ++r) {
      const std::vector<uint64_t> part(all.begin() + long(r * words),
                                       all.begin() + long((r + 1) * words));
      const std::string name = "the part of rank " + std::to_string(r);
      if (!(contributors >> r & 1)) {
        if (std::ranges::any_of(part, [](uint64_t word) { return word != 0; }))
          return name + " is there, and it did not contribute";
        continue;
      }
      const Head head{part[0], part[1], part[2], part[3], part[4], part[5]};
      if (head.rank != r || head.life >= kMostLives * kMostStints || part != partOf(head))
        return name + " is not what it gave";
      const auto [life, count] = last_[r];
      if (count > 0 && (head.life < life || (head.life == life && head.count != count + 1)))
        return name + " is of life " + std::to_string(head.life) + ", call " +
               std::to_string(head.count) + "; the last was of life " + std::to_string(life) +
               ", call " + std::to_string(count);
      if (count > 0 && head.life > life && head.count != 1)
        return name + " is not the first of that life";
      if (count > 0 && head.life == life && !(tookPart_ >> r & 1))
        return "rank " + std::to_string(r) + " had no part in the experts' turn before";
      last_[r] = {head.life, head.count};
      heads.turn = std::max(heads.turn, head.turn);
      heads.ready |= head.ready;
      heads.ends |= head.ends;
    }
    for (size_t r = 0; r < size_t(case_.size); ++r) {
      if (!(contributors >> r & 1)) continue;
      const uint64_t turn = all[r * words + 3];
      if (turn != heads.turn && turn != 0)
        return "rank " + std::to_string(r) + " is in turn " + std::to_string(turn);
    }
    return "";
  }

  const Case& case_;
  const int rank_, life_;
  CaseMemory& memory_;
  Life& log_;
  const std::shared_ptr<SeriesEvents> events_ =
      std::make_shared<SeriesEvents>([](const GroupView&, bool) {});
  std::mutex operation_;  // held while an operation runs, or the line moves
  std::shared_ptr<Membership> job_;
  std::mutex making_;
  std::shared_ptr<Membership> alone_;
  std::unique_ptr<GroupLine> line_;
  std::unique_ptr<MessageTraffic> traffic_;
  std::unique_ptr<ExpertTurns> experts_;
  std::shared_ptr<Group> ranIn_;  // the series of the last operation
  uint32_t tookPart_ = ~0u;       // in the last turn of the experts
  std::thread asker_, remover_;
  std::atomic<bool> hasEnded_{false}, failed_{false}, isRemoving_{false};
  int settledAt_ = 0;     // operations until a removal has happened; 0: not known yet
  int stint_ = 0;         // how often this process has come back
  bool hasLeft_ = false;  // it was taken out, and does not come back
  std::map<size_t, std::pair<uint64_t, uint64_t>> last_;  // of each rank: its life and call
};

// ---- a case while it runs

class RunningCase {
 public:
  RunningCase(Case c, bool isVerbose)
      : case_(std::move(c)), isVerbose_(isVerbose), progressed_(Clock::now()) {
    ranks_.resize(size_t(case_.size));
    for (int r = 0; r < case_.size; ++r) start(r);
  }

  // True when the case is over.
  bool look() {
    const auto now = Clock::now();
    bool haveAllEnded = true;
    for (int r = 0; r < case_.size; ++r) {
      Rank& rank = ranks_[size_t(r)];
      lookAt(r, rank, now);
      for (int life = 0; life <= rank.life; ++life) {
        if (const char* wrong = memory_->lives[r][life].traffic.wrong; wrong[0])
          problem("rank " + std::to_string(r) + "." + std::to_string(life) + ": " + wrong);
      }
      haveAllEnded = haveAllEnded && rank.hasEnded;
    }
    if (!problems_.empty()) return true;
    if (haveAllEnded) {
      compare();
      checkMessages();
      return true;
    }
    if (!memory_->ends && isWhole()) {
      memory_->mayEnd = true;
      if (isChanging()) memory_->mayEnd = false;
      memory_->ends = memory_->mayEnd.load();
    }
    int progress = 0;
    for (int r = 0; r < case_.size; ++r) {
      for (int life = 0; life <= ranks_[size_t(r)].life; ++life)
        progress += memory_->lives[r][life].entries + 1;
    }
    // While a process is missing, the others go on for ever.
    if (now - progressed_ > kHang) problem("the case does not end");
    if (std::exchange(entries_, progress) != progress) moved_ = now;
    if (now - moved_ > kHang / 2) problem("nobody goes on");
    return !problems_.empty();
  }

  const std::vector<std::string>& problems() const { return problems_; }
  bool isDisturbed() const { return isDisturbed_; }
  const Case& played() const { return case_; }
  const std::map<std::string, int>& struck() const { return struck_; }

  std::string story() const {
    std::ostringstream text;
    for (int r = 0; r < case_.size; ++r) {
      for (int life = 0; life <= ranks_[size_t(r)].life; ++life) {
        const Life& one = memory_->lives[r][life];
        text << "  rank " << r << '.' << life << ": " << (one.isIn ? "in, " : "not in, ")
             << one.entries << " operations, " << errorCodeName(one.standing) << ' ' << one.broken;
        if (const TrafficLog& log = one.traffic; log.sent > 0) {
          text << "; messages: " << log.sent << " sent, " << log.received << " received, "
               << log.crossed << " of an earlier series, " << log.lost << " lost, all of "
               << std::hex << log.whole << std::dec << ' ' << log.wrong << ' ' << log.failed << ';';
        }
        uint32_t before = 0;
        for (int i = 0; i < one.entries; ++i) {
          const Entry& entry = one.log[i];
          if (std::exchange(before, entry.contributors) != entry.contributors)
            text << " [turn " << entry.turn << ": " << std::hex << entry.contributors << std::dec
                 << ']';
        }
        text << '\n';
      }
    }
    return text.str();
  }

 private:
  struct Rank {
    int life = -1;
    std::unique_ptr<ForkedChild> child;
    std::vector<std::unique_ptr<ForkedChild>> gone;  // ended, or stopped for good
    Clock::time_point resumeAt = Clock::time_point::max();
    Clock::time_point startAt = Clock::time_point::max();  // of the next life
    bool isForGood = false;
    bool hasEnded = false;
  };

  void problem(const std::string& text) { problems_.push_back(text); }
  const Fault* faultOf(int rank, int life) const {
    for (const Fault& fault : case_.faults) {
      if (fault.rank == rank && fault.life == life) return &fault;
    }
    return nullptr;
  }

  void start(int r) {
    Rank& rank = ranks_[size_t(r)];
    rank.startAt = rank.resumeAt = Clock::time_point::max();
    if (++rank.life == kMostLives) return problem("too many processes");
    progressed_ = Clock::now();
    const int life = rank.life;
    rank.child = std::make_unique<ForkedChild>([this, r, life] {
      if (!isVerbose_) ::dup2(::open("/dev/null", O_WRONLY), STDERR_FILENO);
      Process(case_, r, life, *memory_).run();
    });
  }

  void lookAt(int r, Rank& rank, Clock::time_point now) {
    if (rank.hasEnded) return;
    const std::string name = "rank " + std::to_string(r) + "." + std::to_string(rank.life);
    const Fault* fault = faultOf(r, rank.life);
    if (rank.child) {
      switch (rank.child->look()) {
        case ForkedChild::Event::kNone:
          break;
        case ForkedChild::Event::kStopped:
          ++struck_[fault->point];
          if (fault->resumeAfter >= 0) {
            rank.resumeAt = now + milliseconds(fault->resumeAfter);
          } else {
            rank.isForGood = true;
            rank.hasEnded = memory_->ends;
            rank.startAt = now + kFailureTimeout + case_.pause;
          }
          break;
        case ForkedChild::Event::kEnded:
          ended(r, rank, name, fault, now);
          break;
      }
    }
    if (now >= rank.resumeAt) {
      rank.resumeAt = Clock::time_point::max();
      rank.child->resume();
    }
    if (now < rank.startAt) return;
    memory_->isDead[r][rank.life] = true;
    if (std::exchange(rank.isForGood, false)) rank.gone.push_back(std::move(rank.child));
    start(r);
  }

  void ended(int r, Rank& rank, const std::string& name, const Fault* fault,
             Clock::time_point now) {
    const int status = rank.child->status();
    rank.gone.push_back(std::move(rank.child));
    const Life& life = memory_->lives[r][rank.life];
    if (WIFSIGNALED(status)) {
      if (WTERMSIG(status) != SIGKILL || !fault || fault->action != FailpointAction::kKill)
        return problem(name + " ended with status " + std::to_string(status));
      ++struck_[fault->point];
      rank.hasEnded = memory_->ends;
      if (!rank.hasEnded) rank.startAt = now + case_.pause;
      return;
    }
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
      return problem(name + " ended with status " + std::to_string(status));
    if (life.hasLeft) {
      rank.startAt = now + case_.pause;
      return;
    }
    const ErrorCode standing = life.standing;
    const bool isOut = standing == ErrorCode::kEvicted || standing == ErrorCode::kMinority;
    const bool wasStopped = fault && fault->action == FailpointAction::kStop;
    if (isOut && !memory_->ends) {
      // On a busy machine a living process may be silent for too long.
      isDisturbed_ = isDisturbed_ || !wasStopped;
      if (!wasStopped) problem(name + " is out and should not be");
      rank.startAt = now + case_.pause;
      return;
    }
    if (life.broken[0] && !(isOut && wasStopped)) return problem(name + ": " + life.broken);
    if (!memory_->ends) return problem(name + " ended before the others");
    rank.hasEnded = true;
  }

  // Members have called for a removal, which may still come.
  bool isChanging() const {
    for (int r = 0; r < case_.size; ++r) {
      if (lastLife(r).isChanging) return true;
    }
    return false;
  }

  // Each rank's process has seen all ranks a few times.
  bool isWhole() const {
    if (isChanging()) return false;
    for (int r = 0; r < case_.size; ++r) {
      const Rank& rank = ranks_[size_t(r)];
      const Life& life = memory_->lives[r][rank.life];
      const int entries = life.entries.load(std::memory_order_acquire);
      if (!rank.child || rank.isForGood || entries < 3) return false;
      for (int i = entries - 3; i < entries; ++i) {
        if (life.log[i].contributors != (1u << case_.size) - 1) return false;
      }
      // Not each operation has each step, so the first fault may never come.
      if (!case_.removals.empty() && life.log[entries - 1].turn < case_.removals.back().turn + 5)
        return false;
      if (entries < 60 && rank.life == 0 && faultOf(r, 0) == &case_.faults.front()) return false;
    }
    return true;
  }

  // Two processes that have ended well have had all messages of each other.
  void checkMessages() {
    if (case_.ahead == 0) return;
    for (int r = 0; r < case_.size; ++r) {
      for (int from = 0; from < case_.size; ++from) {
        if (from == r || !hasEndedWell(r) || !hasEndedWell(from)) continue;
        if (!(lastLife(r).traffic.whole >> from & 1))
          problem("rank " + std::to_string(r) + " has not had all messages of rank " +
                  std::to_string(from));
      }
    }
  }
  const Life& lastLife(int r) const { return memory_->lives[r][ranks_[size_t(r)].life]; }
  bool hasEndedWell(int r) const { return lastLife(r).isDone && hasExited(r); }
  bool hasExited(int r) const {
    const auto& gone = ranks_[size_t(r)].gone;
    return !gone.empty() && gone.back()->hasEnded() && WIFEXITED(gone.back()->status());
  }

  // All processes have had the same operations in the same order.
  void compare() {
    std::map<uint64_t, Entry> known;
    for (const bool isBinding : {true, false}) {
      for (int r = 0; r < case_.size; ++r) {
        for (int life = 0; life <= ranks_[size_t(r)].life; ++life) {
          if ((life == ranks_[size_t(r)].life) == isBinding) compare(known, r, life, isBinding);
        }
      }
    }
    for (int r = 0; r < case_.size; ++r) checkParts(known, r);
  }
  // A process has ended each operation to which it has contributed, but for the one in which it died.
  void checkParts(const std::map<uint64_t, Entry>& known, int r) {
    int deaths = 0;
    std::set<uint64_t> ended;
    for (int life = 0; life <= ranks_[size_t(r)].life; ++life) {
      const Life& one = memory_->lives[r][life];
      deaths += !one.hasLeft && !(life == ranks_[size_t(r)].life && hasExited(r));
      for (int i = 0; i < one.entries; ++i) ended.insert(one.log[i].turn);
    }
    std::string missing;
    int count = 0;
    for (const auto& [turn, entry] : known) {
      if (!(entry.contributors >> r & 1) || ended.contains(turn)) continue;
      ++count;
      missing += ' ' + std::to_string(turn);
    }
    if (count > deaths)
      problem("rank " + std::to_string(r) +
              " has contributed to turns that it has not ended:" + missing);
  }
  // The last operation of a dead process, which may have seen its end alone, does not bind the rest.
  void compare(std::map<uint64_t, Entry>& known, int r, int life, bool isBinding) {
    const Life& one = memory_->lives[r][life];
    const std::string name = "rank " + std::to_string(r) + "." + std::to_string(life);
    for (int i = 0; i < one.entries; ++i) {
      const Entry& entry = one.log[i];
      if (i > 0 && (entry.isFirst ? entry.turn <= one.log[i - 1].turn + 1
                                  : entry.turn != one.log[i - 1].turn + 1))
        problem(name + " went from turn " + std::to_string(one.log[i - 1].turn) + " to " +
                std::to_string(entry.turn));
      const auto [place, isNew] = known.emplace(entry.turn, entry);
      const Entry& other = place->second;
      const bool isSame = entry.contributors == other.contributors &&
                          entry.checksum == other.checksum && entry.there == other.there &&
                          entry.back == other.back;
      if (isSame || (!isBinding && i == one.entries - 1)) continue;
      problem(name + " ended turn " + std::to_string(entry.turn) + " in another way than others");
    }
  }

  const Case case_;
  const bool isVerbose_;
  const SharedWithChildren<CaseMemory> memory_;
  std::vector<Rank> ranks_;
  Clock::time_point progressed_, moved_ = Clock::now();
  int entries_ = 0;
  bool isDisturbed_ = false;
  std::vector<std::string> problems_;
  std::map<std::string, int> struck_;
};

TEST(RenewalSweep, AllRanksAreThereInTheEnd) {
  if (!canFork()) GTEST_SKIP() << "threads are left of other tests: run this one by itself";
  const uint64_t seed = numberIn(std::getenv("MOONCAKE_TEST_SEED"), 1);
  const uint64_t count = numberIn(std::getenv("MOONCAKE_TEST_CASES"), kUsualCases);
  const size_t atOnce = numberIn(std::getenv("MOONCAKE_TEST_AT_ONCE"), 1);
  std::vector<std::unique_ptr<RunningCase>> running;
  std::map<uint64_t, int> disturbed;
  std::vector<uint64_t> again;
  std::map<std::string, int> struck, skipped;
  std::map<std::string, std::string> lacks;  // by wire: the reason why it is not there
  uint64_t next = 0, done = 0;
  int failures = 0;
  const auto began = Clock::now();
  while (done < count && failures < 5) {
    while (running.size() < atOnce && (next < count || !again.empty())) {
      uint64_t chosen = seed + next;
      if (again.empty()) {
        ++next;
      } else {
        chosen = again.back();
        again.pop_back();
      }
      Case drawn = drawCase(chosen);
      const auto [lack, isNew] = lacks.try_emplace(drawn.wire.between);
      if (isNew) lack->second = lackOf(drawn.wire.between);
      if (!lack->second.empty()) {
        ++skipped[drawn.wire.name];
        ++done;
        continue;
      }
      running.push_back(std::make_unique<RunningCase>(std::move(drawn), count == 1));
    }
    for (auto& one : running) {
      if (!one->look()) continue;
      if (count == 1) std::cout << describe(one->played()) << '\n' << one->story();
      for (const auto& [point, times] : one->struck()) struck[point] += times;
      if (one->isDisturbed() && ++disturbed[one->played().seed] < 3) {
        again.push_back(one->played().seed);
      } else {
        ++done;
        std::string all;
        for (const auto& problem : one->problems()) all += problem + "\n";
        if (!all.empty()) {
          ++failures;
          ADD_FAILURE() << describe(one->played()) << '\n' << all << one->story();
        }
      }
      one.reset();
    }
    std::erase(running, nullptr);
    std::this_thread::sleep_for(std::chrono::microseconds(500));
  }
  std::cout << done << " cases from seed " << seed << " in "
            << std::chrono::duration<double>(Clock::now() - began).count() << " s; "
            << disturbed.size() << " were run again; struck at";
  for (const auto& [point, times] : struck) std::cout << ' ' << point << ": " << times << ';';
  std::cout << '\n';
  for (const auto& [wire, times] : skipped) std::cout << times << " skipped of " << wire << '\n';
  for (const auto& [wire, lack] : lacks) {
    if (!lack.empty()) std::cout << "no " << wire << ": " << lack << '\n';
  }
}

}  // namespace
}  // namespace mooncake::test
