#include "group/series_events.h"

#include <utility>

namespace mooncake {

GroupOptions SeriesEvents::with(GroupOptions options, uint32_t series) {
  options.onView = [self = shared_from_this(), series](const GroupView& view) {
    self->onView(series, view);
  };
  options.onSeriesEnd = [self = shared_from_this()](const SeriesClose&) { self->onEnd(); };
  return options;
}

void SeriesEvents::begin(uint32_t series, bool isIn) {
  Lock lock(mutex_);
  current_ = series;
  const auto seen = later_.find(series);
  isShown_ = isIn && seen != later_.end();
  if (show_ && !isIn) show_({}, false);
  if (show_ && isShown_) show_(seen->second, false);
  later_.erase(later_.begin(), later_.upper_bound(series));
}

void SeriesEvents::watchEnd(std::function<void()> onEnd) {
  Lock lock(mutex_);
  onEnd_ = std::move(onEnd);
}

void SeriesEvents::onView(uint32_t series, const GroupView& view) {
  Lock lock(mutex_);
  if (series == current_) {
    const bool isLoss = std::exchange(isShown_, true);
    if (show_) show_(view, isLoss);
  } else if (series > current_) {
    later_[series] = view;
  }
}

void SeriesEvents::onEnd() {
  Lock lock(mutex_);
  if (onEnd_) onEnd_();
}

}  // namespace mooncake
