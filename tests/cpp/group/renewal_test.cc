// Groups that end their series and go on in a successor, over all wires; and ranks that die before,
// within and after the decision.
#include "group/renewal.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "base/failpoint.h"
#include "collectives/collectives.h"
#include "engine_side.h"
#include "forked_ranks.h"
#include "group/barrier.h"
#include "group/call_of_several.h"
#include "ranks_in_threads.h"

namespace mooncake::test {
namespace {

using mooncake::testing::eventually;

constexpr uint64_t kNext = 77, kOther = 99;  // successors
constexpr int kRanks = 3;

using OnSeriesEnd = std::function<void(const SeriesClose&)>;

// A group of all ranks of the job.
std::unique_ptr<Group> seriesOf(Group& job, bool raises = false, OnSeriesEnd onSeriesEnd = {}) {
  GroupOptions options{.name = "line", .rank = job.rank(), .size = job.size(), .raises = raises};
  options.globalRanks.resize(size_t(job.size()));
  std::iota(options.globalRanks.begin(), options.globalRanks.end(), 0);
  options.onSeriesEnd = std::move(onSeriesEnd);
  auto group = Group::createWithin(job.membership(), std::move(options), soon());
  EXPECT_TRUE(group.ok()) << group.error().message;
  return group.ok() ? std::move(*group) : nullptr;
}

// The sum over all ranks of `mine`.
Result<int64_t> sumOf(Group& group, int64_t mine) {
  const Status status = allreduce(group, std::as_writable_bytes(std::span(&mine, 1)),
                                  {DType::kInt64, ReduceKind::kSum}, soon());
  if (!status.ok()) return status.error();
  return mine;
}

// All ranks have the same value.
void expectAlike(Group& group, uint64_t value) {
  std::vector<uint64_t> all(size_t(group.size()));
  std::vector<std::span<std::byte>> outputs;
  for (uint64_t& one : all) outputs.push_back(std::as_writable_bytes(std::span(&one, 1)));
  const Status status =
      allgather(group, std::as_bytes(std::span(&value, 1)), outputs, DType::kUInt64, soon());
  ASSERT_TRUE(status.ok()) << status.error().message;
  for (const uint64_t one : all) EXPECT_EQ(one, value);
}

void leave(Group& series) {
  const Status left = series.renewal().leave(soon());
  EXPECT_TRUE(left.ok()) << left.error().message;
}

class RenewalTest : public ::testing::TestWithParam<const char*> {
 protected:
  static void run(const std::function<void(Group& job)>& body, int size = kRanks) {
    runRanks({.size = size, .transports = {GetParam()}}, body);
  }
};

TEST_P(RenewalTest, AnIdleSeriesClosesAndItsCallsMove) {
  run([](Group& job) {
    std::atomic<int> ends = 0;
    const auto first = seriesOf(job, false, [&](const SeriesClose& close) {
      EXPECT_EQ(close, (SeriesClose{kNext, 1}));
      ++ends;
    });
    const auto second = seriesOf(job);
    ASSERT_TRUE(barrier(*first, soon()).ok());
    EXPECT_FALSE(first->renewal().close());
    EXPECT_EQ(first->renewal().leave(soon()).code(), ErrorCode::kInvalidArgument);
    ASSERT_TRUE(first->renewal().readyFor(kNext).ok());
    if (job.rank() == 1) first->renewal().wishFor(kNext);
    const auto close = first->renewal().awaitEnd(soon());
    ASSERT_TRUE(close.ok()) << close.error().message;
    EXPECT_EQ(*close, (SeriesClose{kNext, 1}));
    EXPECT_TRUE(first->renewal().hasEnded());
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(sumOf(*first, 1).error().code, ErrorCode::kMoved);
      EXPECT_EQ(first->lastNumber, 1u);
    }
    EXPECT_EQ(*sumOf(*second, job.rank()), 3);
    EXPECT_TRUE(eventually([&] { return ends == 1; }));
    EXPECT_EQ(first->renewal().readyFor(kOther).code(), ErrorCode::kMoved);
    EXPECT_EQ(first->renewal().notReadyFor(kNext, soon()).code(), ErrorCode::kMoved);
    leave(*first);
    EXPECT_EQ(*sumOf(*second, job.rank()), 3);
    EXPECT_EQ(ends, 1);
  });
}

TEST_P(RenewalTest, ASeriesThatNeverBeganCloses) {
  run([](Group& job) {
    const auto first = seriesOf(job);
    const auto second = seriesOf(job);
    ASSERT_TRUE(first->renewal().readyFor(kNext).ok());
    first->renewal().wishFor(kNext);
    const auto close = first->renewal().awaitEnd(soon());
    ASSERT_TRUE(close.ok()) << close.error().message;
    EXPECT_EQ(close->number, 0u);
    EXPECT_EQ(barrier(*first, soon()).code(), ErrorCode::kMoved);
    leave(*first);
    EXPECT_TRUE(barrier(*second, soon()).ok());
  });
}

// Every call runs in one series on all ranks, and has its result there.
TEST_P(RenewalTest, CallsUnderWayMoveAtOneNumber) {
  for (const bool byAnotherThread : {false, true}) {
    run([&](Group& job) {
      const auto first = seriesOf(job);
      const auto second = seriesOf(job);
      constexpr int kWishAt = 40, kMost = 100'000;
      std::atomic<int> calls = 0;
      std::jthread other([&] {
        if (!byAnotherThread || job.rank() != 2) return;
        EXPECT_TRUE(eventually([&] { return calls >= kWishAt; }));
        first->renewal().wishFor(kNext);
      });
      ASSERT_TRUE(first->renewal().readyFor(kNext).ok());
      Group* current = first.get();
      uint64_t moved = 0;
      for (; calls < kMost && (moved == 0 || calls < int(moved) + 10); ++calls) {
        if (!byAnotherThread && job.rank() == 0 && calls == kWishAt)
          first->renewal().wishFor(kNext);
        auto sum = sumOf(*current, int64_t(calls) + job.rank());
        if (!sum.ok() && sum.error().code == ErrorCode::kMoved) {
          ASSERT_EQ(current, first.get());
          current = second.get();
          moved = uint64_t(calls);
          sum = sumOf(*current, int64_t(calls) + job.rank());
        }
        ASSERT_TRUE(sum.ok()) << sum.error().message;
        ASSERT_EQ(*sum, 3 * int64_t(calls) + 3);
      }
      other.join();
      ASSERT_GE(moved, uint64_t(kWishAt));
      EXPECT_EQ(first->lastNumber, moved);
      EXPECT_EQ(first->renewal().close()->number, moved);
      expectAlike(*second, moved);
      leave(*first);
    });
  }
}

// No series closes inside a call of several operations, also of one that gives up half way.
TEST_P(RenewalTest, ACallOfSeveralOperationsIsNotCut) {
  for (const bool givesUp : {false, true}) {
    run([&](Group& job) {
      const auto first = seriesOf(job);
      const auto second = seriesOf(job);
      std::atomic<int> calls = 0;
      std::jthread other([&] {
        if (job.rank() != 0) return;
        EXPECT_TRUE(eventually([&] { return calls >= 20; }));
        first->renewal().wishFor(kNext);
      });
      ASSERT_TRUE(first->renewal().readyFor(kNext).ok());
      constexpr int kPieces = 3;
      for (bool hasMoved = false; !hasMoved && calls < 100'000; ++calls) {
        CallOfSeveral call(*first);
        for (int piece = 0; piece < kPieces; ++piece) {
          if (piece + 1 == kPieces && !givesUp) call.last();
          const Status status = barrier(*first, soon());
          hasMoved = status.code() == ErrorCode::kMoved;
          if (hasMoved) {
            EXPECT_EQ(piece, 0) << "closed inside a call";
            break;
          }
          ASSERT_TRUE(status.ok()) << status.error().message;
        }
        if (givesUp) call.endsHere();
      }
      other.join();
      EXPECT_TRUE(first->renewal().awaitEnd(soon()).ok());
      EXPECT_EQ(first->lastNumber % kPieces, 0u);
      expectAlike(*second, first->lastNumber);
      leave(*first);
    });
  }
}

// All ranks are idle behind a call that gave up after its first operation.
TEST_P(RenewalTest, ACallThatHasGivenUpLeavesTheSeriesIdle) {
  run([](Group& job) {
    const auto first = seriesOf(job);
    CallOfSeveral call(*first);
    ASSERT_TRUE(barrier(*first, soon()).ok());
    ASSERT_TRUE(first->renewal().readyFor(kNext).ok());
    if (job.rank() == 0) first->renewal().wishFor(kNext);
    EXPECT_TRUE(eventually([&] { return first->renewal().close().has_value(); }));
    EXPECT_FALSE(first->renewal().hasEnded()) << "the call may go on";
    call.endsHere();
    EXPECT_TRUE(first->renewal().hasEnded());
    leave(*first);
  });
}

// The pieces of a large reduction, and the two operations of a long all_to_all, are one call.
TEST_P(RenewalTest, CollectivesInPiecesSayThatTheyGoOn) {
  run(
      [](Group& job) {
        const auto first = seriesOf(job);
        std::vector<float> data((size_t(33) << 20) / sizeof(float), 1.0f);
        std::atomic<int> state = 0;
        std::jthread other([&] {
          if (job.rank() != 0) return;
          EXPECT_TRUE(eventually([&] { return first->endedWord(0).load() > 0 || state == 1; }));
          first->renewal().wishFor(kNext);
        });
        ASSERT_TRUE(first->renewal().readyFor(kNext).ok());
        const Status status = allreduce(*first, std::as_writable_bytes(std::span(data)),
                                        {DType::kFloat32, ReduceKind::kSum}, soon());
        state = 1;
        EXPECT_TRUE(status.ok()) << status.error().message;
        other.join();
        ASSERT_TRUE(first->renewal().awaitEnd(soon()).ok());
        EXPECT_EQ(first->lastNumber, 2u);
        EXPECT_EQ(data.front(), 2.0f);
        EXPECT_EQ(data.back(), 2.0f);
        leave(*first);
      },
      2);
}

TEST_P(RenewalTest, RanksWhoseCallsGoOnDifferentlyAreToldSo) {
  run([](Group& job) {
    std::optional<CallOfSeveral> call;
    if (job.rank() == 0) call.emplace(job);
    const Status status = barrier(job, soon());
    EXPECT_EQ(status.code(), ErrorCode::kMismatch);
    const char* difference = job.rank() == 0
                                 ? "ranks 1, 2 called barrier(), as the last of its call"
                                 : "rank 0 called barrier(), to be continued";
    EXPECT_NE(status.error().message.find(difference), std::string::npos) << status.error().message;
  });
}

TEST_P(RenewalTest, AMemberThatTakesItBackKeepsTheSeriesOpen) {
  run([](Group& job) {
    const auto first = seriesOf(job);
    Renewal& renewal = first->renewal();
    ASSERT_TRUE(renewal.readyFor(kOther).ok());
    ASSERT_TRUE(renewal.readyFor(kNext).ok());
    EXPECT_EQ(renewal.readyFor(3).code(), ErrorCode::kExhausted);
    if (job.rank() == 2) {
      EXPECT_TRUE(renewal.notReadyFor(kNext, soon()).ok());
    }
    ASSERT_TRUE(barrier(job, soon()).ok());
    if (job.rank() == 0) {
      renewal.wishFor(kNext);
      const auto ended = renewal.awaitEnd(Deadline::after(std::chrono::milliseconds(50)));
      ASSERT_FALSE(ended.ok());
      EXPECT_EQ(ended.error().code, ErrorCode::kTimeout);
      EXPECT_NE(ended.error().message.find("rank 2"), std::string::npos) << ended.error().message;
      EXPECT_EQ(ended.error().message.find("rank 1"), std::string::npos) << ended.error().message;
    }
    ASSERT_TRUE(barrier(job, soon()).ok());
    EXPECT_TRUE(barrier(*first, soon()).ok());
    if (job.rank() == 2) renewal.wishFor(kOther);
    const auto close = renewal.awaitEnd(soon());
    ASSERT_TRUE(close.ok()) << close.error().message;
    EXPECT_EQ(close->successor, kOther);
    EXPECT_TRUE(renewal.notReadyFor(kNext, soon()).ok()) << "it has closed with the other one";
    leave(*first);
  });
}

// [mut-move-early] The last operation has not ended on one rank, which may need the others for it.
std::atomic<bool> isHeld, isReleased;
thread_local bool isTheHeldThread = false;

TEST_P(RenewalTest, NoRankLeavesBeforeAllHaveEndedTheLastOperation) {
  isHeld = isReleased = false;
  observeFailpoints([](const char* name) {
    if (!isTheHeldThread || std::strcmp(name, "ended") != 0) return;
    isHeld = true;
    EXPECT_TRUE(eventually([] { return isReleased.load(); }));
  });
  run(
      [](Group& job) {
        const auto first = seriesOf(job);
        ASSERT_TRUE(first->renewal().readyFor(kNext).ok());
        if (job.rank() == 0) {
          EXPECT_TRUE(barrier(*first, soon()).ok());
          EXPECT_TRUE(first->renewal().awaitEnd(soon()).ok());
          EXPECT_TRUE(eventually([] { return isHeld.load(); }));
          const auto left = first->renewal().leave(Deadline::after(std::chrono::milliseconds(50)));
          EXPECT_EQ(left.code(), ErrorCode::kTimeout);
          if (!left.ok()) {
            EXPECT_NE(left.error().message.find("rank 1 has not ended operation #1"),
                      std::string::npos)
                << left.error().message;
          }
          isReleased = true;
        } else {
          EXPECT_TRUE(eventually([&] { return first->copyPart(1, 0).has_value(); }));
          first->renewal().wishFor(kNext);
          EXPECT_TRUE(eventually([&] { return first->renewal().close().has_value(); }));
          EXPECT_EQ(first->renewal().close(), (SeriesClose{kNext, 1})) << "rank 0 has begun it";
          EXPECT_FALSE(first->renewal().hasEnded());
          isTheHeldThread = true;
          EXPECT_TRUE(barrier(*first, soon()).ok());
          isTheHeldThread = false;
        }
        leave(*first);
      },
      2);
  observeFailpoints([](const char*) {});
}

INSTANTIATE_TEST_SUITE_P(Wires, RenewalTest, ::testing::Values("inproc", "shm", "tcp"),
                         [](const auto& param) { return std::string(param.param); });

// ---- deaths

constexpr int kWishAt = 10, kMostCalls = 400;

struct Scene {
  StoreMemory store;
  struct Outcome {
    std::atomic<bool> hasEnded;
    std::atomic<bool> hasMoved;
    std::atomic<uint64_t> calls;   // that ended in the first series, with or without an error
    std::atomic<uint64_t> losses;  // of these, with PeerLost
    std::atomic<int64_t> sum;      // of the first call in the successor; -1: it failed
    std::atomic<int> error;        // of any other kind
  } outcomes[kRanks];
};

struct Death {
  std::string transport;
  int victim;
  const char* point;
  int nth;
  bool raises;
};

std::string nameOf(const ::testing::TestParamInfo<Death>& info) {
  const auto& [transport, victim, point, nth, raises] = info.param;
  std::string name = transport + "_rank" + std::to_string(victim) + "_" + point + "_" +
                     std::to_string(nth) + (raises ? "_raise" : "");
  std::ranges::replace(name, '-', '_');
  return name;
}

// State of a child, for its observer of failpoints.
const Death* death = nullptr;
std::atomic<bool> isArmed;
std::atomic<int> passes;

class RenewalDeaths : public ::testing::TestWithParam<Death> {
 protected:
  // Rank 0 wishes to move, and calls go on until the series has ended.
  static void runRank(Scene& scene, int rank) {
    const Death& is = GetParam();
    Scene::Outcome& outcome = scene.outcomes[rank];
    ForkedStore store(scene.store, std::vector<bool>(kRanks));
    EngineOptions options{.jobKey = Bytes(32, std::byte{7}),
                          .logName = "rank " + std::to_string(rank),
                          .arenaBytes = size_t(1) << 30};
    options.env.failureTimeout = std::chrono::milliseconds(1000);
    options.env.transports = {is.transport};
    auto engine = Engine::create(std::move(options));
    if (!engine.ok()) return;
    auto job = Group::create(
        *engine, store, {.name = "job", .rank = rank, .size = kRanks, .raises = is.raises}, soon());
    if (!job.ok()) return;
    engine->reset();
    const auto first = seriesOf(**job, is.raises), second = seriesOf(**job, is.raises);
    death = rank == is.victim ? &is : nullptr;
    observeFailpoints([](const char* name) {
      if (!death || !isArmed || std::strcmp(name, death->point) != 0) return;
      if (++passes == death->nth) std::raise(SIGKILL);
    });
    if (!first->renewal().readyFor(kNext).ok()) return;
    int64_t mine = 0;
    for (; outcome.calls < kMostCalls; ++outcome.calls) {
      if (outcome.calls == kWishAt - 2) isArmed = true;
      if (outcome.calls == kWishAt && rank == 0) first->renewal().wishFor(kNext);
      const auto sum = sumOf(*first, 1);
      if (sum.ok()) continue;
      outcome.hasMoved = sum.error().code == ErrorCode::kMoved;
      if (outcome.hasMoved) break;
      if (sum.error().code != ErrorCode::kPeerLost) outcome.error = int(sum.error().code);
      ++outcome.losses;
    }
    if (outcome.hasMoved) {
      const Status left = first->renewal().leave(soon());
      if (!left.ok()) outcome.error = int(left.code());
    } else {
      first->leave(soon());
    }
    // In mode `raise`, the loss ends one call of each group.
    auto sum = sumOf(*second, ++mine);
    if (!sum.ok() && is.raises) sum = sumOf(*second, mine);
    outcome.sum = sum.ok() ? *sum : -1;
    second->leave(soon());
    outcome.hasEnded = true;
    (*job)->leave(soon());
  }

  const SharedWithChildren<Scene> scene_;
};

TEST_P(RenewalDeaths, TheSurvivorsMoveTogether) {
  if (!canFork()) GTEST_SKIP() << "threads are left of other tests: run this one by itself";
  const int victim = GetParam().victim;
  std::vector<std::unique_ptr<ForkedChild>> ranks;
  for (int r = 0; r < kRanks; ++r) {
    ranks.push_back(std::make_unique<ForkedChild>([this, r] { runRank(*scene_, r); }));
  }
  EXPECT_TRUE(eventually(
      [&] {
        for (auto& rank : ranks) (void)rank->look();
        return std::ranges::all_of(ranks, [](const auto& rank) { return rank->hasEnded(); });
      },
      std::chrono::seconds(60)));
  EXPECT_FALSE(scene_->outcomes[victim].hasEnded) << "it has not come to this place";
  const int one = victim == 0 ? 1 : 0, other = 3 - victim - one;
  for (const int r : {one, other}) {
    const auto& outcome = scene_->outcomes[r];
    EXPECT_TRUE(outcome.hasEnded) << r;
    EXPECT_EQ(outcome.error, 0) << r;
    EXPECT_EQ(outcome.sum, 2) << r;
  }
  const auto &ours = scene_->outcomes[one], &theirs = scene_->outcomes[other];
  EXPECT_EQ(ours.hasMoved, theirs.hasMoved);
  EXPECT_EQ(ours.calls, theirs.calls);
  EXPECT_EQ(ours.losses, theirs.losses);
  if (victim != 0) {
    EXPECT_TRUE(ours.hasMoved) << "rank 0 has the wish";
  }
}

std::vector<Death> deaths() {
  std::vector<Death> all;
  for (const char* transport : {"shm", "tcp"}) {
    for (const int victim : {0, 1}) {
      for (const bool raises : {false, true}) {
        for (const auto& [point, nth] : {std::pair("begin", 1),
                                         {"begin", 2},
                                         {"report", 1},
                                         {"decide", 1},
                                         {"acted", 1},
                                         {"moved", 1},
                                         {"tell", 3},
                                         {"leave", 1}})
          all.push_back({transport, victim, point, nth, raises});
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Points, RenewalDeaths, ::testing::ValuesIn(deaths()), nameOf);

}  // namespace
}  // namespace mooncake::test
