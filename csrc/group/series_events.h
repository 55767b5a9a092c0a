#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "base/mutex.h"
#include "group/group.h"

namespace mooncake {

// What the series of a line tell its owner. A series is made before the one before it has ended, and
// lives on after it: only the members of the series that calls run in are shown.
class SeriesEvents : public std::enable_shared_from_this<SeriesEvents> {
 public:
  // `isLoss`: a member of the series was lost, and it goes on.
  using Show = std::function<void(const GroupView&, bool isLoss)>;

  // Begins with series 1. `show`: may be called on any thread, one call at a time.
  explicit SeriesEvents(Show show) : show_(std::move(show)) {}

  // Returns the options for the group that is this series.
  GroupOptions with(GroupOptions options, uint32_t series);
  // Calls run in this series from now on: shows its members. If this rank is not in it, no calls run,
  // and no members are shown.
  void begin(uint32_t series, bool isIn = true) EXCLUDES(mutex_);
  // Called when the current series has ended on this rank: see GroupOptions::onSeriesEnd.
  void watchEnd(std::function<void()> onEnd) EXCLUDES(mutex_);

 private:
  void onView(uint32_t series, const GroupView& view) EXCLUDES(mutex_);
  void onEnd() EXCLUDES(mutex_);

  Mutex mutex_;
  uint32_t current_ GUARDED_BY(mutex_) = 1;
  bool isShown_ GUARDED_BY(mutex_) = false;                 // members of the current series
  std::map<uint32_t, GroupView> later_ GUARDED_BY(mutex_);  // of series that have not begun
  const Show show_;
  std::function<void()> onEnd_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
