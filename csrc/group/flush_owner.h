#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/result.h"
#include "base/wait.h"
#include "group/slot.h"
#include "membership/flush.h"

namespace mooncake {

// The ranks that take part in an operation: members of the group that are in the job's view.
struct GroupView {
  uint64_t epoch = 1;       // of the job's view
  std::vector<int> active;  // ranks of the group, ascending
  // Ranks that are in the job's view, but left out of this one operation; ascending.
  std::vector<int> skipped;

  // True if the rank takes part.
  bool contains(int rank) const { return std::ranges::binary_search(active, rank); }
};

// Services of a group that its agent uses.
class FlushOwner {
 public:
  virtual ~FlushOwner() = default;
  virtual Status usable() const = 0;
  // Ends the group with this error.
  virtual void fail(Error why) = 0;
  virtual Waiter waiter(Deadline deadline) const = 0;
  virtual void ring() const = 0;    // the bell of that waiter
  virtual void interruptAll() = 0;  // interrupts every wait
  // Word with the number of the last operation that the rank has ended. Null: its memory is not
  // mapped here.
  virtual std::atomic<uint64_t>* endedWordOf(int rank) const = 0;
  virtual std::optional<SlotCopy> copyPart(uint64_t number, int of) const = 0;
  virtual void putPart(const SlotCopy& copy, int to) const = 0;
  // On the loop's thread.
  virtual void onView(const GroupView& view) = 0;
  virtual void onReconnected(int rank) = 0;
  // The series has ended on this rank. Once; on any thread, without the agent's lock.
  virtual void onSeriesEnd(const SeriesClose& close) = 0;
};

}  // namespace mooncake
