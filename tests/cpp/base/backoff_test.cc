#include "base/backoff.h"

#include <gtest/gtest.h>

namespace mooncake {
namespace {

using std::chrono::milliseconds;

TEST(Repetition, DoublesItsJitteredPauseUpToTheMost) {
  Clock::time_point now{};
  Repetition repetition({milliseconds(10), milliseconds(35)}, now);
  for (const auto pause :
       {milliseconds(10), milliseconds(20), milliseconds(35), milliseconds(35)}) {
    EXPECT_GE(repetition.next(), now + pause / 2);
    EXPECT_LE(repetition.next(), now + pause);
    EXPECT_FALSE(repetition.takeDue(repetition.next() - Clock::duration(1)));
    now = repetition.next();
    EXPECT_TRUE(repetition.takeDue(now));
  }
  EXPECT_EQ(repetition.count(), 4);
}

TEST(Repetition, RanksThatBeginTogetherDoNotRepeatTogether) {
  const Repetition first({milliseconds(1000), milliseconds(1000)}, {});
  bool differs = false;
  for (int i = 0; i < 100; ++i)
    differs =
        differs || Repetition({milliseconds(1000), milliseconds(1000)}, {}).next() != first.next();
  EXPECT_TRUE(differs);
}

TEST(Repetition, EndsWithItsBudget) {
  Repetition repetition({milliseconds(1), milliseconds(4), 2}, {});
  EXPECT_TRUE(repetition.takeDue(repetition.next()));
  EXPECT_TRUE(repetition.takeDue(repetition.next()));
  EXPECT_EQ(repetition.next(), Clock::time_point::max());
  EXPECT_FALSE(repetition.takeDue(Clock::time_point{} + std::chrono::hours(1)));
}

}  // namespace
}  // namespace mooncake
