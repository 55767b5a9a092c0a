// The description of a group's state, and the end of its counters; ranks as threads.
#include "group/group_state.h"

#include <barrier>
#include <csignal>
#include <gtest/gtest.h>
#include <latch>

#include "collectives/collectives.h"
#include "engine_side.h"
#include "ranks_in_threads.h"

namespace mooncake::test {
namespace {

using mooncake::testing::eventually;

Status sumOnes(Group& group) {
  std::vector<float> ones(4, 1);
  return allreduce(group, std::as_writable_bytes(std::span(ones)),
                   {DType::kFloat32, ReduceKind::kSum}, soon());
}

::testing::AssertionResult says(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "'" << part << "' is not in:\n" << text;
}

class GroupState : public ::testing::TestWithParam<const char*> {};

TEST_P(GroupState, NamesWhoHasNotCalled) {
  const bool isMapped = std::string(GetParam()) != "tcp";
  std::latch looked(3);
  runRanks({.size = 3, .transports = {GetParam()}}, [&](Group& group) {
    EXPECT_TRUE(sumOnes(group).ok());
    std::thread stuck;
    if (group.rank() != 2) stuck = std::thread([&] { EXPECT_TRUE(sumOnes(group).ok()); });
    std::string text;
    if (group.rank() == 2) {
      EXPECT_TRUE(eventually([&] {
        text = describeState(group);
        return text.find("ranks 0, 1 began all_reduce #3") != std::string::npos;
      })) << text;
      EXPECT_TRUE(says(text,
                       "rank 2 is in no operation, the last one that it ended is #2; ranks 0, 1 "
                       "began all_reduce #3, which it has not called\n"));
    } else {
      // Ranks that have called are not named.
      EXPECT_TRUE(eventually([&] {
        text = describeState(group);
        return says(text, " waits in all_reduce #3 for rank 2, which has not called it") &&
               says(text, "the last ended operation of rank 2 is #" +
                              std::string(isMapped ? "2\n" : "1 at least\n"));
      })) << text;
      EXPECT_TRUE(says(text, "epoch 1, attempt 0.0, not frozen"));
      EXPECT_TRUE(says(text, "called all_reduce(float32, 4 elements per rank, SUM)"));
    }
    looked.arrive_and_wait();
    if (group.rank() == 2) {
      EXPECT_TRUE(sumOnes(group).ok());
    }
    if (stuck.joinable()) stuck.join();
  });
}

TEST_P(GroupState, NamesWhoHasNotReported) {
  std::latch busy(1), looked(2);
  runRanks({.size = 3, .transports = {GetParam()}}, [&](Group& group) {
    if (group.rank() == 2) {
      // Busy like a caller that computes for long, so it does not report.
      EXPECT_TRUE(group.agent().begin(2).ok());
      busy.count_down();
      looked.wait();
      // Otherwise it would end the others' operation before it hears that they gave it up.
      EXPECT_TRUE(eventually([&] { return group.agent().isFrozen(); }));
      group.agent().end(1, {});
      EXPECT_EQ(sumOnes(group).code(), ErrorCode::kTimeout);
      return;
    }
    busy.wait();
    std::thread stuck([&] {
      std::vector<float> ones(4, 1);
      const Status late = allreduce(group, std::as_writable_bytes(std::span(ones)),
                                    {DType::kFloat32, ReduceKind::kSum},
                                    Deadline::after(std::chrono::milliseconds(1)));
      EXPECT_EQ(late.code(), ErrorCode::kTimeout);
    });
    std::string text;
    EXPECT_TRUE(eventually([&] {
      text = describeState(group);
      return text.find("waits for the reports of rank 2\n") != std::string::npos;
    })) << text;
    EXPECT_TRUE(says(text, "frozen for the flush 0.1"));
    looked.count_down();
    stuck.join();
  });
}

// A stamp has 38 bits for the number of the operation.
TEST_P(GroupState, TheLastNumberEndsTheGroupOnAllRanks) {
  std::barrier<> together(2);
  runRanks({.size = 2, .transports = {GetParam()}}, [&](Group& group) {
    together.arrive_and_wait();
    group.lastNumber = kMostOperations - 2;
    group.endedWord(group.rank()).store(group.lastNumber);
    together.arrive_and_wait();
    for (int i = 0; i < 2; ++i) {
      const Status status = sumOnes(group);
      EXPECT_TRUE(status.ok()) << status.error().message;
    }
    const Status status = sumOnes(group);
    EXPECT_EQ(status.code(), ErrorCode::kExhausted);
    EXPECT_TRUE(says(status.error().message, "make it again"));
    EXPECT_TRUE(says(describeState(group), "cannot go on: "));
    together.arrive_and_wait();
  });
}

INSTANTIATE_TEST_SUITE_P(Wires, GroupState, ::testing::Values("shm", "tcp"));

void somebodyElses(int) {}

TEST(StateSignal, AnotherHandlerStays) {
  ASSERT_NE(std::signal(SIGUSR1, somebodyElses), SIG_ERR);
  const Status refused = describeStatesOnSignal(SIGUSR1);
  EXPECT_EQ(refused.code(), ErrorCode::kInvalidArgument);
  EXPECT_TRUE(says(refused.error().message, "has a handler already"));
  EXPECT_EQ(std::signal(SIGUSR1, SIG_DFL), somebodyElses);
  for (const int none : {0, -1, SIGKILL, 4711})
    EXPECT_EQ(describeStatesOnSignal(none).code(), ErrorCode::kInvalidArgument) << none;
}

}  // namespace
}  // namespace mooncake::test
