// Ranks are killed, stopped or late at every step of every operation and of the flush. Afterwards
// the results of the others are checked. Environment variables:
//   MOONCAKE_TEST_CASES    number of cases: 1 prints every step, 20000 take 15 minutes
//   MOONCAKE_TEST_SEED     seed of the first case
//   MOONCAKE_TEST_AT_ONCE  number of cases that run side by side
//   MOONCAKE_TEST_SKIPS    if set, all operations are dispatches and combines that skip late ranks
//   MOONCAKE_TEST_SHRINKS  if set, all cases are dispatches on hosts that shrink
//   MOONCAKE_TEST_NORMAL   if set, all dispatches are those of the normal mode
#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <sstream>

#include "base/failpoint.h"
#include "base/log.h"
#include "collectives/collectives.h"
#include "draw.h"
#include "ep/calls.h"
#include "forked_ranks.h"
#include "wires/sim/sim_transport.h"

namespace mooncake::test {
namespace {

using std::chrono::milliseconds;

constexpr int kMostDrawnSize = 5;  // of most cases
constexpr int kMostSize = 9;
constexpr int kMostOperations = 12;
constexpr size_t kEager = 8 << 10;
constexpr milliseconds kFailureTimeout{300};
constexpr milliseconds kSlowest{200};  // that a write of a card takes
constexpr auto kHang = std::chrono::seconds(20);
constexpr auto kToMeet = std::chrono::seconds(8);
constexpr size_t kMostHidden = 100'000;  // then tokens go neither with the tables nor at once
constexpr size_t kAmpleBytes = 32 << 20;

// ---- a case

enum class Layout { kShm, kTcp, kMixed, kSim };
constexpr const char* kLayouts[] = {"shm", "tcp", "mixed", "sim"};

struct Victim {
  int rank;
  const char* point;
  uint32_t nth;
  FailpointAction action;
  uint32_t delay = 0;    // kDelay: in ms
  int resumeAfter = -1;  // kStop: ms, -1: when the others have ended
};

struct Step {
  Verb verb;
  int root;  // -1: none
  size_t count;
  bool isCut;  // several tensors in one call, or the data of all_to_all in pieces
};

// The tokens and experts of a dispatch, and its send memory.
struct Experts {
  size_t tokens = 3;  // of each rank
  int topk = 2;
  int perRank = 2;
  int halfPlaces = 0;     // send memory in half places; a place holds a rank's tokens. 0: ample
  bool areRanks = false;  // in the normal mode: a token goes to ranks, and its row has fields

  bool isTight() const { return halfPlaces > 0; }
};

struct Case {
  uint64_t seed;
  int size;
  Layout layout;
  std::vector<int> hosts;   // by rank
  bool areByCards = false;  // kMixed: simulated cards connect the hosts
  bool isSlow = false;      // writes of cards take long enough to be given up
  Experts experts;
  bool raises;
  bool isEarly;  // the first operation may come before the liveness threads
  milliseconds timeout;
  milliseconds patience{0};  // of a dispatch and a combine; 0: they skip no rank
  std::vector<Step> steps;
  std::vector<Victim> victims;
};

constexpr Verb kVerbs[] = {Verb::kAllreduce,     Verb::kBroadcast, Verb::kReduce,  Verb::kAllgather,
                           Verb::kReduceScatter, Verb::kAlltoall,  Verb::kBarrier, Verb::kGather,
                           Verb::kScatter,       Verb::kDispatch};  // and its combine

// Failpoints that ranks reach in some cases only. Point::most: about how often they reach it.
enum class Needs {
  kNothing,
  kLarge,
  kLargeReduction,
  kMessages,
  kRoot,
  kExperts,
  kPushes,
  kWrites
};
struct Point {
  const char* name;
  uint32_t most;
  bool isOfFlush = false;
  Needs needs = Needs::kNothing;
};
constexpr Point kPoints[] = {
    {"begin", 10},
    {"see-begun", 30},
    {"all-begun", 9},
    {"commit", 9},
    {"ended", 9},
    {"copy-out", 9},
    {"leave", 1},
    {"put-begun", 20, false, Needs::kMessages},
    {"put-data", 12, false, Needs::kPushes},
    {"write-data", 12, false, Needs::kWrites},
    {"fetch", 20, false, Needs::kLarge},
    {"publish-done", 6, false, Needs::kLarge},
    {"put-stamp", 20, false, Needs::kMessages},
    {"see-done", 20, false, Needs::kLarge},
    {"ep-take", 8, false, Needs::kExperts},
    {"reduce-chunk", 6, false, Needs::kLargeReduction},
    {"publish-ready", 6, false, Needs::kLargeReduction},
    {"see-ready", 20, false, Needs::kLargeReduction},
    {"all-ready", 6, false, Needs::kLargeReduction},
    {"fetched", 6, false, Needs::kLargeReduction},
    {"agree", 2, true, Needs::kRoot},
    {"end-writes", 3, true, Needs::kWrites},
    {"park", 3, true},
    {"report", 3, true},
    {"tell", 8, true},
    {"join", 4, true},
    {"decide", 3, true},
    {"act", 3, true},
    {"acted", 3, true},
    {"supply", 2, true, Needs::kMessages},
    {"adopt", 2, true},
    {"roll-back", 3, true},
};

size_t drawCount(Draw& draw) {
  switch (draw.below(10)) {
    case 0:
      return 1;
    case 1:
    case 2:
    case 3:
      return 300;
    case 4:
      return 400'000;  // several chunks
    default:
      return 9'000;
  }
}

bool leadsTo(const Case& c, const Point& point) {
  const auto any = [&](auto&& fits) { return std::any_of(c.steps.begin(), c.steps.end(), fits); };
  const auto isLarge = [](const Step& step) {
    return step.verb != Verb::kBarrier && step.count * sizeof(float) > kEager;
  };
  switch (point.needs) {
    case Needs::kNothing:
      return true;
    case Needs::kMessages:
      return c.layout != Layout::kShm;
    case Needs::kLarge:
      return any(isLarge);
    case Needs::kLargeReduction:
      return any([&](const Step& step) {
        return isLarge(step) && (step.verb == Verb::kAllreduce || step.verb == Verb::kReduce);
      });
    case Needs::kExperts:
      return any([](const Step& step) { return step.verb == Verb::kDispatch; });
    case Needs::kPushes:
    case Needs::kWrites: {
      const bool isByCards = c.layout == Layout::kSim || c.areByCards;
      const bool isOurs = point.needs == Needs::kWrites ? isByCards : !isByCards;
      return isOurs && c.layout != Layout::kShm &&
             any([&](const Step& step) { return step.verb == Verb::kDispatch && isLarge(step); });
    }
    case Needs::kRoot:
      return any([](const Step& step) { return step.root >= 0; });
  }
  return false;
}

// The first one dies in an operation; the others often in the flush that follows.
const Point& drawPoint(Draw& draw, const Case& c, bool isFirst) {
  const bool mustBeOfFlush = !isFirst && draw.chance(60);
  for (;;) {
    const Point& point = draw.oneOf(kPoints);
    if (leadsTo(c, point) && (isFirst ? !point.isOfFlush : point.isOfFlush || !mustBeOfFlush))
      return point;
  }
}

// Failpoints at which a rank is late, so that the others go on without it.
constexpr const char* kLateAt[] = {"begin", "copy-out", "ended",   "see-begun",
                                   "park",  "report",   "skipped", "join"};

// Makes the dispatches of some cases those of the normal mode.
void drawNormalMode(Draw& draw, Case& c) {
  if (!draw.chance(40) && !std::getenv("MOONCAKE_TEST_NORMAL")) return;
  c.experts.areRanks = true;
  c.experts.perRank = 1;
  c.experts.topk = std::min(c.experts.topk, c.size);
  if (c.experts.isTight()) ++c.experts.halfPlaces;  // rows are a little larger
}

// Gives the dispatches of some cases a patience, and adds late ranks to the other faults.
void drawSkips(Draw& draw, Case& c) {
  const bool areAll = std::getenv("MOONCAKE_TEST_SKIPS") != nullptr;
  for (Step& step : c.steps) {
    if (areAll) step = {.verb = Verb::kDispatch, .root = -1, .count = step.count, .isCut = false};
  }
  if (std::none_of(c.steps.begin(), c.steps.end(),
                   [](const Step& step) { return step.verb == Verb::kDispatch; }))
    return;
  if (!draw.chance(60) && !areAll) return;
  c.patience = milliseconds(10 + draw.below(50));
  for (int r = 0; r < c.size; ++r) {
    const auto isHers = [&](const Victim& victim) { return victim.rank == r; };
    if (std::any_of(c.victims.begin(), c.victims.end(), isHers) || !draw.chance(40)) continue;
    c.victims.push_back({.rank = r,
                         .point = draw.oneOf(kLateAt),
                         .nth = 1 + static_cast<uint32_t>(draw.below(9)),
                         .action = FailpointAction::kDelay,
                         .delay = 20 + static_cast<uint32_t>(draw.below(130))});
  }
}

// Number of places that a dispatch needs on these hosts: with all ranks, and the most in any
// attempt.
struct PlacesNeeded {
  int whole = 0, most = 0;
};

PlacesNeeded placesNeeded(const std::vector<int>& hostSizes) {
  const int ranks = std::accumulate(hostSizes.begin(), hostSizes.end(), 0);
  int pushed = 0, fetched = 0, mostFetched = 0;
  for (const int size : hostSizes) {
    const int sources = ranks - size;
    pushed = std::max(pushed, (sources + size - 1) / size);
    if (size == 1) continue;
    fetched = std::max(fetched, (sources + size - 1) / size);
    mostFetched = std::max(mostFetched, (sources + 1) / 2);
  }
  const int own = static_cast<int>(hostSizes.size());
  return {own + pushed + fetched, own + pushed + mostFetched};
}

void setHosts(Case& c, const std::vector<int>& hostSizes) {
  c.layout = Layout::kMixed;
  for (size_t host = 0; host < hostSizes.size(); ++host)
    c.hosts.insert(c.hosts.end(), size_t(hostSizes[host]), int(host));
  c.size = static_cast<int>(c.hosts.size());
}

// Dispatches on hosts that shrink, with send memory that is neither exact nor ample. A rank alone
// on its host packs about `topk` places of rows. If a layout is wrong, they overwrite pushed rows.
Case drawShrinkingHost(uint64_t seed, Draw& draw) {
  const std::vector<int> kSizes[] = {{3, 1, 1, 1}, {4, 1, 1, 1}, {4, 3, 1}, {3, 3},
                                     {2, 2, 1},    {4, 4, 1},    {4, 4, 1}};
  Case c{.seed = seed};
  const auto& sizes = draw.oneOf(kSizes);
  setHosts(c, sizes);
  c.areByCards = draw.chance(30);
  c.raises = draw.chance(20);
  c.timeout = milliseconds(20'000);
  c.experts = {.tokens = size_t(8) << draw.below(3),
               .topk = std::min(3 + draw.below(4), c.size),
               .perRank = 1};
  // A combine needs a place for each rank.
  const auto [whole, most] = placesNeeded(sizes);
  const int ample = std::max(most, c.size) + 1;
  c.experts.halfPlaces = draw.chance(70)
                             ? std::max(2 * c.size, 2 * whole + draw.below(2 * (most - whole) + 1))
                             : 2 * c.size + draw.below(2 * (ample - c.size) + 1);
  const size_t count = draw.chance(70) ? 9'000 : 1'000;
  for (int i = 5 + draw.below(4); i > 0; --i)
    c.steps.push_back({.verb = Verb::kDispatch, .root = -1, .count = count, .isCut = false});
  const bool isLate = draw.chance(30);
  if (isLate) c.patience = milliseconds(10 + draw.below(50));
  // One rank of the first host is left, chosen at random: the places that are overwritten first
  // belong to sources of low ranks.
  const int kept = draw.below(sizes.front());
  for (int r = 0; r < sizes.front(); ++r) {
    if (r == kept || (!c.victims.empty() && !draw.chance(50))) continue;
    Victim victim{.rank = r};
    victim.point = isLate ? draw.oneOf(kLateAt) : drawPoint(draw, c, c.victims.empty()).name;
    victim.nth = 1 + static_cast<uint32_t>(draw.below(6));
    victim.action = isLate ? FailpointAction::kDelay : FailpointAction::kKill;
    if (isLate) victim.delay = 20 + static_cast<uint32_t>(draw.below(130));
    c.victims.push_back(victim);
  }
  return c;
}

Case drawUsualCase(uint64_t seed) {
  // By itself, so that the other seeds stay the cases that they are.
  Draw kind(seed * 0x9e3779b97f4a7c15 + 2);
  if (kind.chance(10) || std::getenv("MOONCAKE_TEST_SHRINKS")) return drawShrinkingHost(seed, kind);
  Draw draw(seed * 0x9e3779b97f4a7c15 + 1);
  Case c{.seed = seed, .size = 2 + draw.below(kMostDrawnSize - 1)};
  c.layout = static_cast<Layout>(draw.below(std::size(kLayouts)));
  for (int r = 0; r < c.size; ++r) c.hosts.push_back(draw.below(2));
  c.hosts.back() = 1 - c.hosts.front();
  c.raises = draw.chance(35);
  c.isEarly = draw.chance(10);
  const Verb verb = draw.oneOf(kVerbs);
  const size_t count = drawCount(draw);
  const bool isMixture = draw.chance(40);
  // Only a root that all operations share can be far ahead of the others.
  const int root = draw.chance(50) ? draw.below(c.size) : -1;
  for (int i = 6 + draw.below(4); i > 0; --i) {
    Step step{.verb = isMixture ? draw.oneOf(kVerbs) : verb,
              .root = -1,
              .count = isMixture ? drawCount(draw) : count,
              .isCut = draw.chance(30)};
    if (step.verb == Verb::kBroadcast || step.verb == Verb::kReduce || step.verb == Verb::kGather ||
        step.verb == Verb::kScatter)
      step.root = root < 0 ? draw.below(c.size) : root;
    c.steps.push_back(step);
  }
  const bool isLate = draw.chance(16);  // timeouts in place of deaths, mostly
  const bool isTimedOut = isLate && draw.chance(70);
  c.timeout = isTimedOut ? milliseconds(60 + draw.below(60)) : milliseconds(20'000);
  // A rank that has shown no sign of life yet is not missed.
  const bool isStop = !isLate && !c.isEarly && draw.chance(12);
  const int victims = draw.chance(50) ? 1 : 1 + draw.below(c.size - 1);
  std::vector<int> ranks;
  for (int r = 0; r < c.size; ++r) ranks.push_back(r);
  for (int i = 0; i < victims; ++i) {
    const int at = i + draw.below(c.size - i);
    std::swap(ranks[size_t(i)], ranks[size_t(at)]);
    Victim victim{.rank = ranks[size_t(i)]};
    const Point& point = drawPoint(draw, c, i == 0);
    const uint32_t most = draw.chance(50) ? std::min(point.most, 3u) : point.most;
    victim.point = point.name;
    victim.nth = 1 + static_cast<uint32_t>(draw.below(static_cast<int>(most)));
    victim.action = FailpointAction::kKill;
    if (isLate && (i == 0 || draw.chance(50))) {
      victim.action = FailpointAction::kDelay;
      victim.delay = 40 + static_cast<uint32_t>(draw.below(130));
    } else if (isStop && (i == 0 || draw.chance(30))) {
      victim.action = FailpointAction::kStop;
      if (draw.chance(50)) {
        constexpr int kWhens[] = {20, 100, 280, 300, 320, 340, 400, 600};
        victim.resumeAfter = draw.oneOf(kWhens) + draw.below(10);
      }
    }
    c.victims.push_back(victim);
  }
  drawSkips(draw, c);
  return c;
}

Case drawCase(uint64_t seed) {
  Case c = drawUsualCase(seed);
  Draw rows(seed * 0x9e3779b97f4a7c15 + 4);
  drawNormalMode(rows, c);
  Draw writes(seed * 0x9e3779b97f4a7c15 + 3);
  c.isSlow = (c.layout == Layout::kSim || c.areByCards) && writes.chance(30);
  return c;
}

std::string describe(const Case& c) {
  std::ostringstream text;
  text << "MOONCAKE_TEST_CASES=1 MOONCAKE_TEST_SEED=" << c.seed << ": " << c.size << " ranks, "
       << kLayouts[int(c.layout)];
  if (c.layout == Layout::kMixed) {
    text << " (hosts";
    for (const int host : c.hosts) text << ' ' << host;
    text << (c.areByCards ? ", by cards)" : ")");
  }
  text << (c.isSlow ? ", slow writes" : "") << (c.raises ? ", raise" : ", continue")
       << (c.isEarly ? ", early" : "") << ", timeout " << c.timeout.count() << " ms";
  if (c.patience.count() > 0) text << ", patience " << c.patience.count() << " ms";
  if (c.experts.isTight())
    text << ", top-" << c.experts.topk << ", send memory of " << c.experts.halfPlaces / 2.0
         << " places";
  text << (c.experts.areRanks ? ", normal mode;" : ";");
  for (const Victim& victim : c.victims) {
    text << " rank " << victim.rank;
    if (victim.action == FailpointAction::kKill) text << " is killed";
    if (victim.action == FailpointAction::kDelay) text << " waits " << victim.delay << " ms";
    if (victim.action == FailpointAction::kStop)
      text << " is stopped (goes on "
           << (victim.resumeAfter < 0 ? "after the others"
                                      : "after " + std::to_string(victim.resumeAfter) + " ms")
           << ')';
    text << " at " << victim.point << " #" << victim.nth << ';';
  }
  text << " steps:";
  for (const Step& step : c.steps) {
    text << ' ' << verbName(step.verb);
    if (step.root >= 0) text << '@' << step.root;
    text << 'x' << step.count << (step.isCut ? "/" : "");
  }
  return text.str();
}

// ---- a rank

struct Verdict {
  ErrorCode code;
  uint64_t epoch;
  uint32_t contributors;  // a bit per rank
  uint32_t skipped;       // "
  uint64_t checksum;      // of the data that is the same on all ranks
  bool isRight;           // for these contributors
  bool areInputsIntact;
  uint32_t micros;
  char text[400];
};

struct RankLog {
  std::atomic<int> began, ended;
  std::atomic<ErrorCode> standing;  // at its end
  Verdict verdicts[kMostOperations];
  char broken[200];  // the error, if it could not begin
};

struct CaseMemory {
  StoreMemory store;
  RankLog ranks[kMostSize];
  std::atomic<int> heard;  // ranks that have heard of all others
  RemoteRegion regions[kMostSize];
  std::atomic<int> told;  // ranks that have written theirs
};

float valueOf(int rank, int step, size_t i) {
  return static_cast<float>((i * 7 + size_t(rank) * 13 + size_t(step) * 29) % 101);
}

std::vector<float> inputOf(int rank, int step, size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = valueOf(rank, step, i);
  return values;
}

std::span<std::byte> bytesOf(std::vector<float>& values) {
  return std::as_writable_bytes(std::span(values));
}

uint64_t checksumOf(const std::vector<float>& values) {
  uint64_t sum = 1469598103934665603u;
  for (const float value : values) sum = (sum ^ std::bit_cast<uint32_t>(value)) * 1099511628211u;
  return sum;
}

constexpr Reduction kSum{DType::kFloat32, ReduceKind::kSum};
constexpr float kStale = -7;

// Data that is there.
class AllThere final : public InputFeed {
 public:
  Status await(size_t) override { return {}; }
  Status restart() override { return {}; }
};

// Calls one operation and records its result.
class Caller {
 public:
  Caller(ep::Memory& memory, int index, const Case& c)
      : memory_(memory),
        group_(memory.group),
        index_(index),
        step_(c.steps[size_t(index)]),
        experts_(c.experts),
        deadline_(Deadline::after(c.timeout)) {
    if (c.patience.count() > 0) patience_ = c.patience;
  }

  void call(Verdict& verdict) {
    const auto start = Clock::now();
    const size_t size = size_t(group_.size()), count = step_.count;
    const bool isForAll = step_.verb == Verb::kReduceScatter || step_.verb == Verb::kAlltoall ||
                          step_.verb == Verb::kScatter;
    const bool isRoot = group_.rank() == step_.root;
    input_ = step_.verb == Verb::kBarrier || (step_.verb == Verb::kScatter && !isRoot)
                 ? std::vector<float>()
                 : inputOf(group_.rank(), index_, count * (isForAll ? size : 1));
    switch (step_.verb) {
      case Verb::kAllreduce:
        data_ = input_;
        status_ = step_.isCut ? allreduce(group_, cut(bytesOf(data_)), kSum.kind, deadline_)
                              : allreduce(group_, bytesOf(data_), kSum, deadline_);
        break;
      case Verb::kReduce:
        data_ = input_;
        status_ = reduce(group_, bytesOf(data_), kSum, step_.root, deadline_);
        break;
      case Verb::kBroadcast:
        data_ = input_;
        status_ = broadcast(group_, bytesOf(data_), DType::kFloat32, step_.root, deadline_);
        break;
      case Verb::kAllgather: {
        data_.assign(count * size, kStale);
        std::vector<Span> outputs;
        for (const Span part : partsOf(data_, count)) {
          for (const Buffer& buffer : cut(part)) outputs.push_back(buffer.data);
        }
        status_ = allgather(group_, cut(bytesOf(input_)), outputs, deadline_);
        break;
      }
      case Verb::kReduceScatter: {
        data_.assign(count, kStale);
        std::vector<Buffer> inputs, outputs = cut(bytesOf(data_));
        for (size_t i = 0; i < outputs.size(); ++i) {
          for (const Span part : partsOf(input_, count)) inputs.push_back(cut(part)[i]);
        }
        status_ = step_.isCut
                      ? reduceScatter(group_, inputs, outputs, kSum.kind, deadline_)
                      : reduceScatter(group_, bytesOf(input_), bytesOf(data_), kSum, deadline_);
        break;
      }
      case Verb::kGather:
        data_.assign(isRoot ? count * size : 0, kStale);
        status_ = gather(group_, bytesOf(input_), partsOf(data_, count), DType::kFloat32,
                         step_.root, deadline_);
        break;
      case Verb::kScatter: {
        data_.assign(count, kStale);
        const auto parts = partsOf(input_, count);
        const std::vector<ConstSpan> inputs(parts.begin(), parts.end());
        status_ = scatter(group_, inputs, bytesOf(data_), DType::kFloat32, step_.root, deadline_);
        break;
      }
      case Verb::kAlltoall: {
        data_.assign(count * size, kStale);
        const auto parts = partsOf(input_, count);
        const std::vector<ConstSpan> inputs(parts.begin(), parts.end());
        // Only some ranks begin before their data is there.
        AllThere feed;
        const bool isFed = step_.isCut && (group_.rank() + index_) % 2 == 0;
        status_ = alltoall(group_, inputs, partsOf(data_, count), DType::kFloat32, deadline_,
                           isFed ? &feed : nullptr);
        break;
      }
      case Verb::kDispatch:
        status_ = experts_.areRanks ? normalThereAndBack() : thereAndBack();
        break;
      default:
        status_ = barrier(group_, deadline_);
    }
    const auto took = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start);
    verdict.micros = static_cast<uint32_t>(took.count());
    verdict.code = status_.code();
    const std::string text = status_.ok() ? "" : status_.error().message;
    std::snprintf(verdict.text, sizeof(verdict.text), "%s", text.c_str());
    if (status_.ok() && group_.lastView) {
      verdict.epoch = group_.lastView->epoch;
      for (const int r : group_.lastView->active) verdict.contributors |= 1u << r;
      for (const int r : group_.lastView->skipped) verdict.skipped |= 1u << r;
    }
    contributors_ = verdict.contributors;
    verdict.isRight = !status_.ok() || isRight();
    verdict.areInputsIntact = areInputsIntact();
    if (step_.verb == Verb::kAllreduce || step_.verb == Verb::kBroadcast ||
        step_.verb == Verb::kAllgather)
      verdict.checksum = checksumOf(data_);
    if (step_.verb == Verb::kDispatch) verdict.checksum = tookPart_;
  }

 private:
  // The experts return their input, so a token comes back once for each of its experts on a rank
  // that took part.
  Status thereAndBack() {
    const auto handle = std::make_shared<ep::Handle>();
    const size_t tokens = experts_.tokens, topk = size_t(experts_.topk);
    handle->shape = {group_.size(), numExperts(), tokens, std::min(step_.count, kMostHidden)};
    handle->experts =
        std::make_shared<const ep::ExpertMap>(handle->shape.numExperts, group_.size());
    handle->tokens = tokens;
    handle->topk = topk;
    for (int t = 0; t < int(tokens); ++t) {
      for (int j = 0; j < experts_.topk; ++j) handle->chosen.push_back(expertOf(t, j));
    }
    const size_t hidden = handle->shape.hidden, ranks = size_t(group_.size());
    const size_t local = handle->experts->numLocal(group_.rank());
    std::vector<uint16_t> x, back(tokens * hidden);
    for (size_t i = 0; i < tokens * hidden; ++i)
      x.push_back(uint16_t(std::bit_cast<uint32_t>(valueOf(group_.rank(), index_, i)) >> 16));
    std::vector<std::byte> rows(local * ranks * tokens * hidden * 2);
    std::vector<int32_t> counts(local), sources(local * ranks * tokens);
    std::vector<int64_t> ranges(local * ranks);
    ep::DispatchCall there;
    there.x = x.data();
    there.mask = GroupRanks::firstRanks(group_.size());
    there.deadline = deadline_;
    there.patience = patience_;
    there.handle = handle;
    there.rows = rows.data();
    there.counts = counts.data();
    there.sources = sources.data();
    there.ranges = ranges.data();
    ep::Ending ending;
    MOONCAKE_TRY(ep::dispatch(memory_, there, ending));
    ending.participants.forEach([&](int r) { tookPart_ |= uint64_t(1) << r; });
    ending = {};
    const auto missing = std::make_unique<bool[]>(tokens);
    const std::vector<float> weights(topk * tokens, 1);
    ep::CombineCall home;
    home.x = rows.data();
    home.rowStride = 2 * hidden;
    home.chosen = handle->chosen;
    home.weights = weights.data();
    home.mask = there.mask;
    home.deadline = deadline_;
    home.patience = patience_;
    home.handle = handle;
    home.combined = back.data();
    home.missing = missing.get();
    MOONCAKE_TRY(ep::combine(memory_, home, ending));
    ending.participants.forEach([&](int r) { tookPart_ |= uint64_t(1) << (32 + r); });
    const bool areWeIn = ending.participants.contains(group_.rank());
    for (size_t t = 0; t < tokens; ++t) {
      int times = 0;
      for (int j = 0; j < experts_.topk; ++j)
        times +=
            areWeIn && ending.participants.contains(handle->experts->owner(expertOf(int(t), j)));
      areTokensRight_ = areTokensRight_ && missing[t] == (times < experts_.topk);
      for (size_t i = t * hidden; i < (t + 1) * hidden; ++i) {
        areTokensRight_ =
            areTokensRight_ && back[i] == toBf16(float(times) * valueOf(group_.rank(), index_, i));
      }
    }
    return {};
  }

  // The same in the normal mode: a rank receives a token once, and its answer is the token. The rows
  // of ranks stand apart, as those of a call in several pieces do.
  Status normalThereAndBack() {
    const auto handle = std::make_shared<ep::Handle>();
    const size_t tokens = experts_.tokens, topk = size_t(experts_.topk);
    const size_t ranks = size_t(group_.size());
    handle->shape = {group_.size(), group_.size(), tokens, std::min(step_.count, kMostHidden)};
    handle->experts = std::make_shared<const ep::ExpertMap>(group_.size(), group_.size());
    handle->tokens = tokens;
    handle->topk = topk;
    for (int t = 0; t < int(tokens); ++t) {
      for (int j = 0; j < experts_.topk; ++j)
        handle->chosen.push_back((group_.rank() + t + j) % group_.size());
    }
    const size_t hidden = handle->shape.hidden, room = tokens + 1;
    std::vector<uint16_t> x = tokensOf(group_.rank(), tokens * hidden), back(tokens * hidden);
    std::vector<uint32_t> numbers;
    for (size_t t = 0; t < tokens; ++t) numbers.push_back(numberOf(group_.rank(), t));
    std::vector<uint16_t> rows(ranks * room * hidden);
    std::vector<uint32_t> arrived(ranks * room);
    std::vector<int32_t> sources(ranks * room);
    int32_t count = 0;
    std::vector<int64_t> ranges(ranks);
    ep::DispatchCall there;
    there.format = ep::RowFormat::kFields;
    there.fields = {{reinterpret_cast<const std::byte*>(x.data()), 2 * hidden,
                     reinterpret_cast<std::byte*>(rows.data())},
                    {reinterpret_cast<const std::byte*>(numbers.data()), sizeof(uint32_t),
                     reinterpret_cast<std::byte*>(arrived.data())}};
    for (size_t r = 0; r < ranks; ++r) there.places.push_back({r * room, r * room + tokens});
    there.mask = GroupRanks::firstRanks(group_.size());
    there.deadline = deadline_;
    there.patience = patience_;
    there.handle = handle;
    there.counts = &count;
    there.sources = sources.data();
    there.ranges = ranges.data();
    ep::Ending ending;
    MOONCAKE_TRY(ep::dispatch(memory_, there, ending));
    ending.participants.forEach([&](int r) { tookPart_ |= uint64_t(1) << r; });
    for (size_t r = 0; r < ranks; ++r) {
      const std::vector<uint16_t> sent = tokensOf(int(r), tokens * hidden);
      for (size_t i = 0; i < size_t(ranges[r] & 0xffffffff); ++i) {
        const size_t row = r * room + i, token = size_t(sources[row]);
        areTokensRight_ =
            areTokensRight_ && token < tokens && arrived[row] == numberOf(int(r), token) &&
            std::equal(&rows[row * hidden], &rows[row * hidden] + hidden, &sent[token * hidden]);
      }
    }
    ending = {};
    const auto missing = std::make_unique<bool[]>(tokens);
    const std::vector<float> weights(topk * tokens, 1);
    std::vector<float> extras(ranks * room), extraSums(tokens);
    for (size_t i = 0; i < extras.size(); ++i) extras[i] = float(arrived[i]);
    ep::CombineCall home;
    home.x = reinterpret_cast<const std::byte*>(rows.data());
    home.rows = ranks * room;
    home.rowStride = 2 * hidden;
    for (size_t r = 0; r < ranks; ++r) home.firstRows.push_back(r * room);
    home.extras = 1;
    home.extrasOfRows = extras.data();
    home.extraSums = extraSums.data();
    home.chosen = handle->chosen;
    home.weights = weights.data();
    home.mask = there.mask;
    home.deadline = deadline_;
    home.patience = patience_;
    home.handle = handle;
    home.combined = back.data();
    home.missing = missing.get();
    MOONCAKE_TRY(ep::combine(memory_, home, ending));
    ending.participants.forEach([&](int r) { tookPart_ |= uint64_t(1) << (32 + r); });
    const bool areWeIn = ending.participants.contains(group_.rank());
    for (size_t t = 0; t < tokens; ++t) {
      int times = 0;
      for (size_t j = 0; j < topk; ++j)
        times += areWeIn && ending.participants.contains(handle->chosen[t * topk + j]);
      areTokensRight_ = areTokensRight_ && missing[t] == (times < experts_.topk) &&
                        extraSums[t] == float(times) * float(numbers[t]);
      for (size_t i = t * hidden; i < (t + 1) * hidden; ++i) {
        areTokensRight_ =
            areTokensRight_ && back[i] == toBf16(float(times) * valueOf(group_.rank(), index_, i));
      }
    }
    return {};
  }
  std::vector<uint16_t> tokensOf(int rank, size_t count) const {
    std::vector<uint16_t> tokens;
    for (size_t i = 0; i < count; ++i)
      tokens.push_back(uint16_t(std::bit_cast<uint32_t>(valueOf(rank, index_, i)) >> 16));
    return tokens;
  }
  static uint32_t numberOf(int rank, size_t token) {
    return uint32_t(1000 * rank + int(token) + 1);
  }

  int numExperts() const { return experts_.perRank * group_.size(); }
  int expertOf(int token, int place) const {
    if (experts_.isTight()) return (group_.rank() + token + place) % numExperts();
    return (group_.rank() + 3 * token + 2 * place) % numExperts();
  }
  // Rounds to the nearest even, as a combine does.
  static uint16_t toBf16(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }

  static std::vector<Span> partsOf(std::vector<float>& values, size_t count) {
    std::vector<Span> parts;
    for (size_t at = 0; at < values.size(); at += count)
      parts.push_back(bytesOf(values).subspan(at * sizeof(float), count * sizeof(float)));
    return parts;
  }
  // Returns the bytes as one tensor, or as several of different lengths.
  std::vector<Buffer> cut(Span bytes) const {
    if (!step_.isCut) return {{bytes, DType::kFloat32}};
    const size_t third = bytes.size() / 12 * 4;
    return {{bytes.first(4), DType::kFloat32},
            {bytes.subspan(4, third), DType::kFloat32},
            {bytes.subspan(4 + third), DType::kFloat32}};
  }
  bool contributes(int rank) const { return contributors_ >> rank & 1; }

  std::vector<float> sumFrom(size_t offset) const {
    std::vector<float> sum(step_.count);
    for (int r = 0; r < group_.size(); ++r) {
      if (!contributes(r)) continue;
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += valueOf(r, index_, offset + i);
    }
    return sum;
  }

  bool isRight() const {
    const int rank = group_.rank();
    switch (step_.verb) {
      case Verb::kAllreduce:
        return data_ == sumFrom(0);
      case Verb::kReduce:
        return data_ == (rank == step_.root ? sumFrom(0) : input_);
      case Verb::kBroadcast:
        return data_ == inputOf(step_.root, index_, step_.count);
      case Verb::kReduceScatter:
        return data_ == sumFrom(size_t(rank) * step_.count);
      case Verb::kScatter:
        for (size_t i = 0; i < step_.count; ++i) {
          if (data_[i] != valueOf(step_.root, index_, size_t(rank) * step_.count + i)) return false;
        }
        return true;
      case Verb::kGather:
        if (rank != step_.root) return true;
        [[fallthrough]];
      case Verb::kAllgather:
      case Verb::kAlltoall:
        for (int r = 0; r < group_.size(); ++r) {
          const size_t from = step_.verb == Verb::kAlltoall ? size_t(rank) * step_.count : 0;
          for (size_t i = 0; i < step_.count; ++i) {
            if (data_[size_t(r) * step_.count + i] !=
                (contributes(r) ? valueOf(r, index_, from + i) : 0))
              return false;
          }
        }
        return true;
      case Verb::kDispatch:
        return areTokensRight_;
      default:
        return true;
    }
  }

  bool areInputsIntact() const {
    switch (step_.verb) {
      case Verb::kAllreduce:
        return status_.ok() || data_ == input_;
      case Verb::kReduce:
        return (status_.ok() && group_.rank() == step_.root) || data_ == input_;
      case Verb::kBroadcast:
        return group_.rank() != step_.root || data_ == input_;
      default:
        return input_ == inputOf(group_.rank(), index_, input_.size());
    }
  }

  ep::Memory& memory_;
  Group& group_;
  const int index_;
  const Step step_;
  const Experts experts_;
  const Deadline deadline_;
  std::optional<Clock::duration> patience_;
  uint64_t tookPart_ = 0;  // in the dispatch, and from bit 32 on in the combine
  std::vector<float> input_, data_;
  Status status_;
  bool areTokensRight_ = true;
  uint32_t contributors_ = 0;
};

bool isOut(ErrorCode code) { return code == ErrorCode::kEvicted || code == ErrorCode::kMinority; }

// Waits until all ranks have seen signs of life of all others. A rank without one is not missed,
// and its end is not certain.
void awaitSigns(const Group& group, int rank, std::atomic<int>& heard) {
  const Deadline deadline = Deadline::after(std::chrono::seconds(2));
  for (int r = 0; r < group.size(); ++r) {
    while (r != rank && !deadline.passed() &&
           Liveness::signOf(*group.window().peer(r)->channel) == 0)
      std::this_thread::sleep_for(milliseconds(1));
  }
  ++heard;
  while (heard < group.size() && !deadline.passed()) std::this_thread::sleep_for(milliseconds(1));
}

// The result of Hosts::meet(). No rank dies before this.
ep::Hosts hostsOf(const Case& c, int rank, ep::Hosts::Memory ours, CaseMemory& memory) {
  memory.regions[rank] = ours.region;
  ++memory.told;
  const Deadline deadline = Deadline::after(kToMeet);
  while (memory.told < c.size && !deadline.passed()) std::this_thread::sleep_for(milliseconds(1));
  std::vector<ep::Hosts::Memory> all;
  for (int r = 0; r < c.size; ++r) {
    GroupRanks& mapped = all.emplace_back(ours).mapped;
    all.back().region = memory.regions[r];
    for (int other = 0; other < c.size; ++other) {
      const bool isNear =
          c.layout == Layout::kShm ||
          (c.layout == Layout::kMixed && c.hosts[size_t(r)] == c.hosts[size_t(other)]);
      if (other == r || isNear) mapped.add(other);
    }
  }
  return ep::Hosts(std::move(all));
}

// Size of the smallest buffer that has the send memory of the case.
size_t expertBytes(const Case& c) {
  if (!c.experts.isTight()) return kAmpleBytes;
  const size_t row = ep::dispatchRowBytes(c.steps.front().count, ep::RowFormat::kBf16);
  const size_t send = c.experts.tokens * row * size_t(c.experts.halfPlaces) / 2;
  size_t bytes = send * 4;  // a sixteenth more at most is lost to alignment
  while (ep::BufferLayout(bytes).sendBytes() >= send) bytes -= 1024;
  while (ep::BufferLayout(bytes).sendBytes() < send) bytes += 128;
  return bytes;
}

// Runs a rank, in the child.
void runRank(const Case& c, int rank, CaseMemory& memory) {
  RankLog& log = memory.ranks[rank];
  std::vector<bool> isRemote;
  for (int r = 0; r < c.size; ++r)
    isRemote.push_back(c.layout == Layout::kMixed && c.hosts[size_t(r)] != c.hosts[size_t(rank)]);
  ForkedStore store(memory.store, std::move(isRemote));
  EngineOptions options{.jobKey = Bytes(32, std::byte{7}),
                        .logName = "rank " + std::to_string(rank),
                        .arenaBytes = size_t(1) << 30};
  options.env.failureTimeout = kFailureTimeout;
  options.env.simSeed = c.seed;
  if (c.isSlow) {
    defaultSimOptions().odds.slowWrites = 3;
    defaultSimOptions().odds.lateness = kSlowest;
  }
  options.env.transports = {"shm", "tcp"};
  if (c.areByCards) options.env.transports = {"shm", "sim"};
  if (c.layout != Layout::kMixed) options.env.transports = {kLayouts[int(c.layout)]};
  auto engine = Engine::create(std::move(options));
  if (!engine.ok()) {
    std::snprintf(log.broken, sizeof(log.broken), "%s", engine.error().message.c_str());
    return;
  }
  auto group = Group::create(*engine, store,
                             {.name = "sweep",
                              .rank = rank,
                              .size = c.size,
                              .env = {.eagerBytes = kEager},
                              .pushBytes = ep::kPushBytes,
                              .raises = c.raises},
                             Deadline::after(kToMeet));
  if (!group.ok()) {
    std::snprintf(log.broken, sizeof(log.broken), "%s", group.error().message.c_str());
    log.standing = group.error().code;
    return;
  }
  engine->reset();
  const size_t bytes = expertBytes(c);
  auto block = (*group)->reserve(bytes);
  if (!block.ok()) {
    std::snprintf(log.broken, sizeof(log.broken), "%s", block.error().message.c_str());
    return;
  }
  const ep::BufferLayout layout(bytes);
  const auto landing = (*group)->engine().regions().add(block->data, 2 * layout.sendBytes(),
                                                        kRemoteWrite | kLasting);
  if (!landing.ok()) return;
  ep::Hosts::Memory ours{.sendBytes = layout.sendBytes(), .region = landing->remote()};
  ep::Memory expertMemory{**group, *block, layout, hostsOf(c, rank, std::move(ours), memory)};
  if (!c.isEarly) awaitSigns(**group, rank, memory.heard);
  for (const Victim& victim : c.victims) {
    if (victim.rank == rank) armFailpoint(victim.point, victim.nth, victim.action, victim.delay);
  }
  for (int i = 0; i < int(c.steps.size()); ++i) {
    log.began = i + 1;
    Caller caller(expertMemory, i, c);
    caller.call(log.verdicts[i]);
    log.ended = i + 1;
    if (isOut(log.verdicts[i].code)) break;
  }
  (*group)->leave(Deadline::after(std::chrono::seconds(5)));
  log.standing = (*group)->usable().code();
}

// ---- checks afterwards

class Checker {
 public:
  Checker(const Case& c, const CaseMemory& memory, const std::vector<int>& statuses)
      : case_(c), memory_(memory), statuses_(statuses) {}

  // Returns all problems; empty: none.
  const std::vector<std::string>& check() {
    for (int r = 0; r < case_.size; ++r) sortIn(r);
    if (problems_.empty()) checkWhoIsOut();
    for (int r = 0; r < case_.size; ++r) checkOwn(r);
    for (const int r : survivors_) checkAgainst(r, survivors_.front(), true);
    const int model = survivors_.empty() ? longest() : survivors_.front();
    for (int r = 0; r < case_.size; ++r) {
      if (!isSurvivor(r) && r != model) checkAgainst(r, model, false);
    }
    if (!survivors_.empty() && case_.raises) checkLosses(survivors_.front());
    return problems_;
  }
  // True if a rank was taken for dead by mistake: the machine may have been too slow.
  bool isDisturbed() const { return isDisturbed_; }

 private:
  const RankLog& log(int rank) const { return memory_.ranks[rank]; }
  const Victim* victim(int rank, FailpointAction action) const {
    for (const Victim& one : case_.victims) {
      if (one.rank == rank && one.action == action) return &one;
    }
    return nullptr;
  }
  bool isSurvivor(int rank) const {
    return std::find(survivors_.begin(), survivors_.end(), rank) != survivors_.end();
  }
  void problem(const std::string& text) { problems_.push_back(text); }
  static std::string nameOf(int rank) { return "rank " + std::to_string(rank); }

  // True if the victim died in its first operation, before this rank had its group. This rank is
  // alone then, and may not know that for certain.
  bool wasLeftInInit(int r) const {
    return case_.isEarly && log(r).broken[0] && log(r).standing == ErrorCode::kMinority;
  }

  void sortIn(int r) {
    const int status = statuses_[size_t(r)];
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && victim(r, FailpointAction::kKill))
      return;
    if (wasLeftInInit(r)) {
      out_.emplace_back(r, log(r).standing);
      return;
    }
    if (log(r).broken[0]) {
      // No group: on a busy machine a handshake can take longer than the failure timeout.
      isDisturbed_ = true;
      return problem(nameOf(r) + ": " + log(r).broken);
    }
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
      return problem(nameOf(r) + " ended with status " + std::to_string(status));
    const ErrorCode standing = log(r).standing;
    if (!isOut(standing)) return survivors_.push_back(r);
    out_.emplace_back(r, standing);
  }

  void checkWhoIsOut() {
    const bool canDoubt = case_.layout != Layout::kShm || case_.isEarly ||
                          std::any_of(case_.victims.begin(), case_.victims.end(), [](auto& one) {
                            return one.action == FailpointAction::kStop;
                          });
    const auto ends = std::count_if(case_.victims.begin(), case_.victims.end(), [](auto& one) {
      return one.action != FailpointAction::kDelay;
    });
    const bool canLackQuorum = canDoubt && 2 * (case_.size - int(ends)) <= case_.size;
    for (const auto& [r, code] : out_) {
      if (victim(r, FailpointAction::kStop)) continue;
      if (code == ErrorCode::kMinority && canLackQuorum) continue;
      // The others have left already, and the dead ranks count against its quorum.
      if (code == ErrorCode::kMinority && canDoubt && log(r).ended == int(case_.steps.size()))
        continue;
      isDisturbed_ = true;
      problem(nameOf(r) + " is out and should not be: " + errorCodeName(code));
    }
  }

  void checkOwn(int r) {
    const bool isLate = case_.timeout < std::chrono::seconds(1);
    for (int i = 0; i < log(r).ended; ++i) {
      const Verdict& v = log(r).verdicts[i];
      const std::string what = nameOf(r) + ", operation " + std::to_string(i) + ": ";
      const bool isLoss =
          v.code == ErrorCode::kPeerLost && (case_.raises || case_.steps[size_t(i)].root >= 0);
      // Happens only if another rank is out and leaves without waiting.
      if (v.code == ErrorCode::kInputsLost && !out_.empty()) continue;
      const bool isTimeout = v.code == ErrorCode::kTimeout && isLate &&
                             std::string(v.text).find("timed out") != std::string::npos;
      if (v.code != ErrorCode::kOk && !isLoss && !isTimeout && !isOut(v.code))
        problem(what + "unexpected " + errorCodeName(v.code) + ": " + v.text);
      if (!v.isRight) problem(what + "the result is not that of its contributors");
      // Nothing is promised to a rank that is out.
      if (!v.areInputsIntact && !isOut(v.code) && v.code != ErrorCode::kInputsLost)
        problem(what + "inputs changed, " + errorCodeName(v.code));
      for (int c = 0; c < case_.size; ++c) {
        if ((v.contributors >> c & 1) && log(c).began <= i)
          problem(what + nameOf(c) + " contributed what it never began");
      }
      for (const int s : survivors_) {
        if (v.code == ErrorCode::kOk && !((v.contributors | v.skipped) >> s & 1))
          problem(what + nameOf(s) + ", a survivor, did not contribute");
      }
    }
  }

  // If the rank is dead or out, the last decision that it alone has acted on does not bind the
  // others: the end of one operation, and an error of the next one (docs/membership.md, section 5).
  void checkAgainst(int r, int model, bool isBinding) {
    int ended = log(r).ended;
    if (ended && isOut(log(r).verdicts[ended - 1].code)) --ended;
    for (int i = 0; i < std::min<int>(ended, log(model).ended); ++i) {
      const Verdict &a = log(r).verdicts[i], &b = log(model).verdicts[i];
      if (isOut(b.code)) break;
      const bool isSame = a.code == b.code && a.contributors == b.contributors &&
                          a.skipped == b.skipped &&
                          (a.code != ErrorCode::kOk || a.checksum == b.checksum);
      if (isSame) continue;
      // It may have ended it with the old contributors, or without those that had not begun.
      const uint32_t old = a.contributors | a.skipped;
      const bool isMore = (old & b.contributors) == b.contributors;
      const bool isLast =
          i == ended - 1 || (i == ended - 2 && log(r).verdicts[ended - 1].code != ErrorCode::kOk);
      const bool areBothOk = a.code == ErrorCode::kOk && b.code == ErrorCode::kOk;
      if (!isBinding && isLast && (isMore || !areBothOk)) break;
      // No rank survived, so either of the two may be ahead.
      if (survivors_.empty() && i >= std::min<int>(ended, log(model).ended) - 1) continue;
      problem(nameOf(r) + " and " + nameOf(model) + " ended operation " + std::to_string(i) +
              " differently");
    }
  }

  // Mode raise: the contributors change only at losses, and each loss is raised once.
  void checkLosses(int r) {
    int losses = 0;
    uint32_t before = (1u << case_.size) - 1;
    for (int i = 0; i < log(r).ended; ++i) {
      const Verdict& v = log(r).verdicts[i];
      const bool isRootLost = std::string(v.text).find("the root,") != std::string::npos;
      if (v.code == ErrorCode::kPeerLost && !isRootLost) ++losses;
      if (v.code != ErrorCode::kOk) continue;
      const uint32_t members = v.contributors | v.skipped;
      const int fewer = std::popcount(before) - std::popcount(members);
      if (fewer < losses || (fewer > 0 && losses == 0)) {
        problem(nameOf(r) + ", operation " + std::to_string(i) + ": " + std::to_string(fewer) +
                " members are gone and " + std::to_string(losses) + " losses were raised");
      }
      before = members;
      losses = 0;
    }
  }

  int longest() const {
    int best = 0;
    for (int r = 1; r < case_.size; ++r) {
      if (log(r).ended > log(best).ended) best = r;
    }
    return best;
  }

  const Case& case_;
  const CaseMemory& memory_;
  const std::vector<int>& statuses_;
  std::vector<int> survivors_;
  std::vector<std::pair<int, ErrorCode>> out_;
  std::vector<std::string> problems_;
  bool isDisturbed_ = false;
};

// ---- one case after the other, some side by side

class RunningCase {
 public:
  RunningCase(Case c, bool isVerbose) : case_(std::move(c)), progressed_(Clock::now()) {
    for (int r = 0; r < case_.size; ++r) {
      children_.emplace_back([&] {
        if (!isVerbose) {
          const int nowhere = ::open("/dev/null", O_WRONLY);
          ::dup2(nowhere, STDERR_FILENO);
        }
        runRank(case_, r, *memory_);
      });
    }
    resumeAt_.resize(size_t(case_.size));
    isStopped_.resize(size_t(case_.size));
  }

  // True when all ranks have ended, or hang.
  bool look() {
    const auto now = Clock::now();
    size_t ended = 0, stopped = 0;
    for (size_t r = 0; r < children_.size(); ++r) {
      if (children_[r].look() == ForkedChild::Event::kStopped) {
        hasStopped_ = isStopped_[r] = true;
        resumeAt_[r] = Clock::time_point::max();
        for (const Victim& victim : case_.victims) {
          if (victim.rank == int(r) && victim.resumeAfter >= 0)
            resumeAt_[r] = now + milliseconds(victim.resumeAfter);
        }
      }
      ended += children_[r].hasEnded();
      stopped += isStopped_[r];
    }
    for (size_t r = 0; r < children_.size(); ++r) {
      if (!isStopped_[r] || (now < resumeAt_[r] && ended + stopped < children_.size())) continue;
      isStopped_[r] = false;
      children_[r].resume();
    }
    if (ended == children_.size()) return true;
    int progress = 0;
    for (const RankLog& log : memory_->ranks) progress += log.began + log.ended;
    if (std::exchange(progress_, progress) != progress) progressed_ = now;
    if (now - progressed_ < kHang) return false;
    isHung_ = true;
    return true;
  }

  std::vector<std::string> problems(bool& isDisturbed) {
    isDisturbed = false;
    std::vector<std::string> found;
    if (isHung_) {
      std::string who;
      for (size_t r = 0; r < children_.size(); ++r) {
        if (!children_[r].hasEnded()) who += " " + std::to_string(r);
        isDisturbed = isDisturbed || memory_->ranks[r].broken[0];
      }
      return {"ranks hang:" + who};
    }
    std::vector<int> statuses;
    for (const auto& child : children_) statuses.push_back(child.status());
    Checker checker(case_, *memory_, statuses);
    found = checker.check();
    isDisturbed = checker.isDisturbed();
    return found;
  }

  // Number of operations that skipped ranks.
  int skips() const {
    int most = 0;
    for (const RankLog& log : memory_->ranks) {
      int skips = 0;
      for (int i = 0; i < log.ended; ++i)
        skips += log.verdicts[i].code == ErrorCode::kOk && log.verdicts[i].skipped != 0;
      most = std::max(most, skips);
    }
    return most;
  }
  bool hasStruck() const {
    return hasStopped_ || std::any_of(children_.begin(), children_.end(), [](const auto& child) {
             return child.hasEnded() && WIFSIGNALED(child.status());
           });
  }

  std::string story() const {
    std::ostringstream text;
    for (int r = 0; r < case_.size; ++r) {
      const RankLog& log = memory_->ranks[r];
      text << "  rank " << r << ": began " << log.began << ", ended " << log.ended
           << (children_[size_t(r)].hasEnded() ? ", status " : ", still there ")
           << children_[size_t(r)].status() << ' ' << log.broken << '\n';
      for (int i = 0; i < log.ended; ++i) {
        const Verdict& v = log.verdicts[i];
        text << "    " << i << ' ' << verbName(case_.steps[size_t(i)].verb) << ": "
             << errorCodeName(v.code) << ", epoch " << v.epoch << ", contributors " << std::hex
             << v.contributors << ", skipped " << v.skipped << ", checksum " << v.checksum
             << std::dec << ", " << v.micros << " us " << (v.isRight ? "" : "WRONG ")
             << (v.areInputsIntact ? "" : "CHANGED ") << v.text << '\n';
      }
    }
    return text.str();
  }

  const Case& played() const { return case_; }

 private:
  const Case case_;
  const SharedWithChildren<CaseMemory> memory_;
  Clock::time_point progressed_;  // when a rank last began or ended an operation
  int progress_ = 0;
  std::vector<ForkedChild> children_;
  std::vector<Clock::time_point> resumeAt_;
  std::vector<bool> isStopped_;
  bool hasStopped_ = false;
  bool isHung_ = false;
};

TEST(FaultSweep, SurvivorsAgreeOnEveryOperation) {
  if (!canFork()) GTEST_SKIP() << "threads are left of other tests: run this one by itself";
  int skips = 0;
  const uint64_t seed = numberIn(std::getenv("MOONCAKE_TEST_SEED"), 1);
  const uint64_t count = numberIn(std::getenv("MOONCAKE_TEST_CASES"), 250);
  const size_t atOnce = numberIn(std::getenv("MOONCAKE_TEST_AT_ONCE"), 4);
  const bool isVerbose = count == 1;
  const auto start = Clock::now();
  std::vector<std::unique_ptr<RunningCase>> running;
  std::map<uint64_t, int> disturbed;  // by seed: how often
  std::vector<uint64_t> again;
  std::map<std::string, int> struckAt;
  uint64_t next = 0, done = 0;
  int failures = 0;
  while (done < count && failures < 5) {
    while (running.size() < atOnce && (next < count || !again.empty())) {
      uint64_t chosen = seed + next;
      if (!again.empty()) {
        chosen = again.back();
        again.pop_back();
      } else {
        ++next;
      }
      running.push_back(std::make_unique<RunningCase>(drawCase(chosen), isVerbose));
    }
    for (auto& one : running) {
      if (!one->look()) continue;
      bool isDisturbed = false;
      const auto problems = one->problems(isDisturbed);
      const Case& played = one->played();
      if (isVerbose) std::cout << describe(played) << '\n' << one->story();
      if (isDisturbed && ++disturbed[played.seed] < 3) {
        again.push_back(played.seed);
      } else {
        ++done;
        if (!problems.empty()) {
          ++failures;
          std::string all;
          for (const auto& problem : problems) all += problem + "\n";
          ADD_FAILURE() << describe(played) << '\n' << all << one->story();
        }
      }
      skips += one->skips();
      if (one->hasStruck()) {
        for (const Victim& victim : played.victims)
          ++struckAt[std::string(kLayouts[int(played.layout)]) + " " + victim.point];
      }
      one.reset();
    }
    std::erase(running, nullptr);
    std::this_thread::sleep_for(std::chrono::microseconds(500));
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  std::cout << done << " cases from seed " << seed << " in " << seconds << " s, "
            << double(done) / seconds << " per second; " << disturbed.size()
            << " were run again: the machine was too busy for the failure timeout; " << skips
            << " operations went without somebody\n";
  for (const auto& [seedOf, times] : disturbed)
    std::cout << "  seed " << seedOf << ": " << times << '\n';
  if (std::getenv("MOONCAKE_TEST_COVERAGE")) {
    for (const auto& [where, times] : struckAt) std::cout << "  " << where << ": " << times << '\n';
  }
}

// Hosts of 4, 4 and 1 ranks. Their send memory has room for a dispatch of all ranks, but not of
// every subset. Rank 8 packs its rows while the others push to it.
class ShrunkHost : public testing::TestWithParam<FailpointAction> {};

TEST_P(ShrunkHost, RowsOfRanksStayApart) {
  if (!canFork()) GTEST_SKIP() << "threads are left of other tests: run this one by itself";
  const bool areKilled = GetParam() == FailpointAction::kKill;
  for (const bool areByCards : {false, true}) {
    Case c{.seed = 1, .areByCards = areByCards, .timeout = milliseconds(20'000)};
    setHosts(c, {4, 4, 1});
    c.experts = {.tokens = 64, .topk = 5, .perRank = 1, .halfPlaces = 27};
    if (!areKilled) c.patience = milliseconds(20);
    c.steps.assign(kMostOperations, {.verb = Verb::kDispatch, .root = -1, .count = 2048});
    for (const int rank : {2, 3}) {
      for (uint32_t nth = 2; nth < (areKilled ? 3u : 20u); nth += 4)
        c.victims.push_back(
            {.rank = rank, .point = "copy-out", .nth = nth, .action = GetParam(), .delay = 150});
    }
    RunningCase running(c, false);
    while (!running.look()) std::this_thread::sleep_for(std::chrono::microseconds(500));
    bool isDisturbed = false;
    for (const auto& problem : running.problems(isDisturbed))
      ADD_FAILURE() << describe(c) << '\n' << problem << '\n' << running.story();
    EXPECT_TRUE(areKilled ? running.hasStruck() : running.skips() > 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Losses, ShrunkHost,
                         testing::Values(FailpointAction::kKill, FailpointAction::kDelay),
                         [](const auto& param) {
                           return param.param == FailpointAction::kKill ? "Killed" : "Late";
                         });

}  // namespace
}  // namespace mooncake::test
