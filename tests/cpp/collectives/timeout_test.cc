// A rank that waits too long ends the operation on all ranks, and the group goes on
// (docs/membership.md).
#include <atomic>
#include <gtest/gtest.h>
#include <latch>
#include <string_view>
#include <thread>

#include "base/failpoint.h"
#include "collectives/collectives.h"
#include "ranks_in_threads.h"

namespace mooncake::test {
namespace {

constexpr Reduction kIntSum{DType::kInt32, ReduceKind::kSum};

Status sumOnes(Group& group, size_t count, Deadline deadline, int* result = nullptr) {
  std::vector<int32_t> ones(count, 1);
  const Status status =
      allreduce(group, std::as_writable_bytes(std::span(ones)), kIntSum, deadline);
  if (result) *result = ones.back();
  return status;
}

TEST(TimeoutTest, IsTheSameForTheLateRankAndTheGroupGoesOn) {
  std::latch gaveUp(2);
  runRanks({.size = 3, .transports = {"shm"}}, [&](Group& group) {
    for (const size_t count : {size_t(10), size_t(100000)}) {
      int sum = 0;
      EXPECT_TRUE(sumOnes(group, count, soon(), &sum).ok());
      EXPECT_EQ(sum, 3);
    }
    if (group.rank() == 2) {
      gaveUp.wait();
    }
    const Status late = sumOnes(
        group, 10, group.rank() == 2 ? soon() : Deadline::after(std::chrono::milliseconds(50)));
    ASSERT_EQ(late.code(), ErrorCode::kTimeout);
    if (group.rank() != 2) gaveUp.count_down();
    EXPECT_NE(late.error().message.find("rank 2"), std::string::npos) << late.error().message;
    for (int round = 0; round < 5; ++round) {
      int sum = 0;
      const Status after = sumOnes(group, 10, soon(), &sum);
      EXPECT_TRUE(after.ok()) << after.error().message;
      EXPECT_EQ(sum, 3);
    }
  });
}

thread_local int begun = -1;  // operations that this thread has begun; -1: not counted
std::atomic<bool> isOver{false};

// A data set of more than 32 MiB is reduced piece by piece, in place.
TEST(TimeoutTest, BetweenPiecesTheInputsAreLost) {
  static constexpr size_t kCount = (size_t(40) << 20) / sizeof(int32_t);
  isOver = false;
  // One rank begins the second piece after the other one has given up. It asks how the piece ends.
  observeFailpoints([](const char* name) {
    if (std::string_view(name) == "park") isOver = true;
    if (begun < 0 || std::string_view(name) != "begin" || ++begun != 2) return;
    while (!isOver) std::this_thread::yield();
  });
  runRanks({.size = 2, .transports = {"shm"}}, [&](Group& group) {
    begun = group.rank() == 1 ? 0 : -1;
    const Status status = sumOnes(group, kCount, Deadline::after(std::chrono::seconds(2)));
    begun = -1;
    ASSERT_EQ(status.code(), ErrorCode::kInputsLost) << status.error().message;
    EXPECT_NE(status.error().message.find("timed out"), std::string::npos)
        << status.error().message;
    int sum = 0;
    EXPECT_TRUE(sumOnes(group, 10, soon(), &sum).ok());
    EXPECT_EQ(sum, 2);
  });
  observeFailpoints([](const char*) {});
  areFailpointsOn = false;
}

// The rank misses more operations than a rank remembers the ends of.
TEST(TimeoutTest, WhoIsAwayForManyOperationsFindsThemEnded) {
  constexpr int kMissed = int(kRemembered) + 8;
  std::latch gaveUp(1);
  runRanks({.size = 2, .transports = {"shm"}}, [&](Group& group) {
    EXPECT_TRUE(sumOnes(group, 10, soon()).ok());
    if (group.rank() == 1) gaveUp.wait();
    for (int i = 0; i < kMissed; ++i) {
      const auto patience =
          group.rank() == 1 ? soon() : Deadline::after(std::chrono::milliseconds(5));
      EXPECT_FALSE(sumOnes(group, 10, patience).ok());
    }
    if (group.rank() == 0) gaveUp.count_down();
    EXPECT_TRUE(sumOnes(group, 10, soon()).ok());
  });
}

TEST(TimeoutTest, AbortEndsAWaitFromAnotherThread) {
  std::latch ended(1);
  runRanks({.size = 2, .transports = {"shm"}}, [&](Group& group) {
    if (group.rank() == 1) return ended.wait();
    std::thread aborter([&] { group.fail({ErrorCode::kAborted, "enough"}); });
    const Status status = sumOnes(group, 10, soon());
    aborter.join();
    EXPECT_EQ(status.code(), ErrorCode::kAborted);
    EXPECT_EQ(sumOnes(group, 10, soon()).code(), ErrorCode::kAborted);
    ended.count_down();
  });
}

TEST(TimeoutTest, TheOthersGoOnWithoutARankThatLeft) {
  for (const char* transport : {"shm", "tcp", "inproc"}) {
    for (const size_t count : {size_t(10), size_t(100000)}) {
      runRanks({.size = 3, .transports = {transport}}, [&](Group& group) {
        int sum = 0;
        EXPECT_TRUE(sumOnes(group, count, soon(), &sum).ok());
        EXPECT_EQ(sum, 3);
        if (group.rank() == 1) return;  // its engine says goodbye
        for (int round = 0; round < 3; ++round) {
          const Status status = sumOnes(group, count, soon(), &sum);
          EXPECT_TRUE(status.ok()) << status.error().message;
          EXPECT_EQ(sum, 2);
          EXPECT_EQ(group.lastView->active, (std::vector{0, 2}));
        }
      });
    }
  }
}

TEST(TimeoutTest, OverMessagesTooTheLateRankIsToldAndTheGroupGoesOn) {
  std::latch gaveUp(2);
  runRanks({.size = 3, .transports = {"tcp"}}, [&](Group& group) {
    if (group.rank() == 2) gaveUp.wait();
    const Status late = sumOnes(
        group, 10, group.rank() == 2 ? soon() : Deadline::after(std::chrono::milliseconds(50)));
    ASSERT_EQ(late.code(), ErrorCode::kTimeout);
    if (group.rank() != 2) gaveUp.count_down();
    EXPECT_NE(late.error().message.find("rank 2"), std::string::npos) << late.error().message;
    for (const size_t count : {size_t(10), size_t(100000)}) {
      int sum = 0;
      const Status after = sumOnes(group, count, soon(), &sum);
      EXPECT_TRUE(after.ok()) << after.error().message;
      EXPECT_EQ(sum, 3);
    }
  });
}

TEST(TimeoutTest, ARankThatLeavesWhileOthersStillConnectIsNoHang) {
  for (const char* transport : {"shm", "tcp", "inproc"}) {
    for (int round = 0; round < 20; ++round) {
      runRanks({.size = 3, .transports = {transport}}, [](Group&) {});
    }
  }
}

TEST(TimeoutTest, ARankThatNeverComesIsNamedWhenTheGroupIsMade) {
  MemoryStore store;
  EngineOptions options;
  options.jobKey = Bytes(32, std::byte{7});
  auto engine = Engine::create(std::move(options));
  ASSERT_TRUE(engine.ok());
  auto group = Group::create(*engine, store, {.name = "test", .rank = 0, .size = 3},
                             Deadline::after(std::chrono::milliseconds(50)));
  ASSERT_FALSE(group.ok());
  EXPECT_EQ(group.error().code, ErrorCode::kTimeout);
  EXPECT_NE(group.error().message.find("ranks 1, 2 of 3"), std::string::npos)
      << group.error().message;
}

}  // namespace
}  // namespace mooncake::test
