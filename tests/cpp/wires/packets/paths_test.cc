// The choice of paths to a peer, tested without a clock.
#include "wires/packets/paths.h"

#include <gtest/gtest.h>

namespace mooncake::testing {
namespace {

using std::chrono::milliseconds;

class PathsTest : public ::testing::Test {
 protected:
  void SetUp() override { paths.reset(3); }
  Clock::time_point at(int millisecond) const { return start + milliseconds(millisecond); }

  const Clock::time_point start = Clock::now();
  Paths paths{milliseconds(100)};
};

TEST_F(PathsTest, TheNextThatIsUpIsChosen) {
  EXPECT_EQ(paths.choose(4), 1u);
  EXPECT_TRUE(paths.leaveOut(1, at(0)));
  EXPECT_FALSE(paths.leaveOut(1, at(0)));
  EXPECT_EQ(paths.choose(4), 2u);
  EXPECT_EQ(paths.up(), 2u);
  EXPECT_FALSE(paths.allOutSince());
  paths.leaveOut(0, at(5));
  paths.leaveOut(2, at(7));
  EXPECT_FALSE(paths.choose(4));
  EXPECT_EQ(paths.allOutSince(), at(7));
}

TEST_F(PathsTest, TheOneWithTheFewestUnderWayIsChosen) {
  for (const size_t path : {0, 0, 1, 2}) paths.began(path, at(0));
  EXPECT_EQ(paths.choose(0), 1u);
  EXPECT_EQ(paths.choose(2), 2u);
  paths.leaveOut(1, at(1));
  EXPECT_EQ(paths.choose(0), 2u);
  paths.acknowledged(0, at(0), at(2));
  paths.acknowledged(0, at(0), at(2));
  EXPECT_EQ(paths.choose(2), 0u);
}

TEST_F(PathsTest, StallsWhereNothingComesToItsEnd) {
  paths.began(0, at(0));
  paths.began(0, at(90));  // a later operation does not postpone the stall
  paths.began(1, at(0));
  paths.began(1, at(0));
  paths.acknowledged(1, at(0), at(50));
  paths.began(2, at(0));
  paths.acknowledged(2, at(0), at(10));
  EXPECT_TRUE(paths.stalled(at(100)).empty());
  EXPECT_EQ(paths.stalled(at(101)), std::vector<size_t>{0});
  EXPECT_EQ(paths.stalled(at(151)), (std::vector<size_t>{0, 1}));
  paths.leaveOut(0, at(151));
  EXPECT_EQ(paths.stalled(at(151)), std::vector<size_t>{1});
  // An operation that moved to another path is no evidence about this one.
  paths.dropped(1);
  paths.began(1, at(160));
  EXPECT_EQ(paths.stalled(at(260)), std::vector<size_t>{});
}

TEST_F(PathsTest, APacketIsOvertakenByOneThatLeftAQuarterOfTheStallLimitLater) {
  EXPECT_FALSE(paths.isOvertaken(0, at(0)));
  for (const int leftAt : {0, 25, 26}) paths.began(0, at(leftAt));
  paths.acknowledged(0, at(25), at(200));
  EXPECT_FALSE(paths.isOvertaken(0, at(0))) << "it may be slower";
  paths.acknowledged(0, at(26), at(200));
  EXPECT_TRUE(paths.isOvertaken(0, at(0)));
  EXPECT_FALSE(paths.isOvertaken(0, at(1)));
  EXPECT_FALSE(paths.isOvertaken(1, at(0))) << "of another path";
  paths.acknowledged(0, at(10), at(201));
  EXPECT_TRUE(paths.isOvertaken(0, at(0))) << "an older one says nothing";
  paths.reset(3);
  EXPECT_FALSE(paths.isOvertaken(0, at(0))) << "on a new connection";
}

TEST_F(PathsTest, ComesBackByAnAnswerToAProbeThatWasSentSince) {
  paths.leaveOut(1, at(0));
  const auto first = paths.probes(at(0));
  ASSERT_EQ(first.size(), 1u);
  EXPECT_EQ(first[0].path, 1u);
  EXPECT_EQ(paths.answered(first[0].number, at(1)), 1u);
  EXPECT_TRUE(paths.isUp(1));
  paths.leaveOut(1, at(2));
  EXPECT_FALSE(paths.answered(first[0].number, at(3))) << "an old answer";
  EXPECT_FALSE(paths.answered(first[0].number + 1, at(3))) << "of another path";
  const auto second = paths.probes(at(3));
  ASSERT_EQ(second.size(), 1u);
  EXPECT_EQ(paths.answered(second[0].number, at(4)), 1u);
}

TEST_F(PathsTest, ProbesBecomeRarer) {
  paths.leaveOut(1, at(0));
  int count = 0;
  for (int now = 0; now < 10'000; ++now) count += int(paths.probes(at(now)).size());
  EXPECT_GT(count, 20);
  EXPECT_LT(count, 40);
  EXPECT_TRUE(paths.hasWork());
}

}  // namespace
}  // namespace mooncake::testing
