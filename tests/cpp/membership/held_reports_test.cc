#include "membership/held_reports.h"

#include <gtest/gtest.h>

namespace mooncake {
namespace {

using std::chrono::milliseconds;

const Clock::time_point kStart{std::chrono::hours(1)};
constexpr milliseconds kLimit(100);

ViewReport reportOf(int from, int rank, Cause cause) {
  const bool isCertain = cause == Cause::kExited || isGoodbye(cause);
  return {.from = from,
          .gone = isCertain ? JobRanks{rank} : JobRanks(),
          .suspected = isCertain ? JobRanks() : JobRanks{rank},
          .accusations = {{rank, cause, from}}};
}

TEST(HeldReports, OfWhoLeftWaitUntilThatIsKnownHere) {
  HeldReports held(kLimit);
  EXPECT_TRUE(held.keep(reportOf(1, 2, Cause::kLeft), {0}, kStart));
  EXPECT_TRUE(held.keep(reportOf(3, 2, Cause::kEnded), {0}, kStart + milliseconds(1)));
  EXPECT_EQ(held.nextTick(), kStart + kLimit);
  EXPECT_TRUE(held.take({0, 1}, kStart + milliseconds(2)).empty());
  const auto taken = held.take({0, 2}, kStart + milliseconds(2));
  ASSERT_EQ(taken.size(), 2u);
  EXPECT_EQ(taken[0], reportOf(1, 2, Cause::kLeft));
  EXPECT_EQ(taken[1], reportOf(3, 2, Cause::kEnded));
  EXPECT_FALSE(held.nextTick());
}

TEST(HeldReports, OfAnythingElseDoNotWait) {
  HeldReports held(kLimit);
  for (const Cause cause : {Cause::kExited, Cause::kSilent, Cause::kRefused, Cause::kUnreachable})
    EXPECT_FALSE(held.keep(reportOf(1, 2, cause), {0}, kStart));
  EXPECT_FALSE(held.keep(reportOf(1, 2, Cause::kLeft), {0, 2}, kStart));
  EXPECT_FALSE(held.nextTick());
}

// The limit counts from the first report, however often it is sent. The connection to the rank that
// left may have broken.
TEST(HeldReports, WaitNoLongerThanTheLimit) {
  HeldReports held(kLimit);
  EXPECT_TRUE(held.keep(reportOf(1, 2, Cause::kLeft), {0}, kStart));
  ViewReport later = reportOf(1, 2, Cause::kLeft);
  later.gone.add(3);
  later.accusations.push_back({3, Cause::kExited, 1});
  EXPECT_TRUE(held.keep(later, {0}, kStart + milliseconds(90)));
  EXPECT_EQ(held.nextTick(), kStart + kLimit);
  EXPECT_TRUE(held.take({0}, kStart + kLimit - milliseconds(1)).empty());
  const auto taken = held.take({0}, kStart + kLimit);
  ASSERT_EQ(taken.size(), 1u);
  EXPECT_EQ(taken[0], later) << "the last one says what the first one says";
}

TEST(HeldReports, AreNotTakenTwice) {
  HeldReports held(kLimit);
  EXPECT_TRUE(held.keep(reportOf(1, 2, Cause::kLeft), {0}, kStart));
  EXPECT_FALSE(held.keep(reportOf(1, 2, Cause::kLeft), {0, 2}, kStart));
  EXPECT_TRUE(held.take({0, 2}, kStart).empty());
}

}  // namespace
}  // namespace mooncake
