#include "group/series_events.h"

#include <gtest/gtest.h>
#include <vector>

namespace mooncake {
namespace {

struct Shown {
  std::vector<int> ranks;
  bool isLoss = false;
};

class SeriesEventsTest : public ::testing::Test {
 protected:
  void see(uint32_t series, std::vector<int> ranks) {
    events_->with({}, series).onView({.active = std::move(ranks)});
  }

  Shown shown_;
  const std::shared_ptr<SeriesEvents> events_ =
      std::make_shared<SeriesEvents>([this](const GroupView& view, bool isLoss) {
        shown_ = {view.active, isLoss};
      });
};

TEST_F(SeriesEventsTest, ALaterSeriesIsShownWhenItBegins) {
  see(1, {0, 1, 2});
  EXPECT_FALSE(shown_.isLoss);
  see(2, {0, 1, 2, 3});
  EXPECT_EQ(shown_.ranks, std::vector<int>({0, 1, 2}));
  see(1, {0, 2});
  EXPECT_TRUE(shown_.isLoss);
  events_->begin(2);
  EXPECT_EQ(shown_.ranks, std::vector<int>({0, 1, 2, 3}));
  EXPECT_FALSE(shown_.isLoss);
}

// The members have made the next series already when a process that comes back leaves the old one.
TEST_F(SeriesEventsTest, ALaterSeriesIsNotForgottenWhileTheRankIsOut) {
  see(1, {0, 1, 2});
  see(2, {0, 1, 2, 3});
  events_->begin(1, false);
  EXPECT_TRUE(shown_.ranks.empty());
  events_->begin(2);
  EXPECT_EQ(shown_.ranks, std::vector<int>({0, 1, 2, 3}));
}

}  // namespace
}  // namespace mooncake
