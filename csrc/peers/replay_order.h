#pragma once

#include <memory>

#include "base/result.h"
#include "device/accelerator.h"
#include "device/replay_event.h"

namespace mooncake {

// Keeps the kernels of a group in one order: kernels of calls, which are on one stream, and kernels
// of graphs, on whichever streams replay them. The order is that in which the program calls and
// replays, from one thread at a time. An event marks the end of the last kernel that has been
// launched.
class ReplayOrder {
 public:
  // `calls` is the stream of the kernels of calls.
  ReplayOrder(Accelerator& accelerator, DeviceStream calls)
      : accelerator_(accelerator), calls_(calls) {}
  // The event stays: the program may replay a graph at any time.
  ~ReplayOrder() { (void)event_.release(); }
  ReplayOrder(const ReplayOrder&) = delete;
  ReplayOrder& operator=(const ReplayOrder&) = delete;

  // Around the launch of a call's kernel. Without graphs they do nothing.
  Status beforeCall() { return event_ ? event_->block(calls_) : Status(); }
  Status afterCall() { return event_ ? event_->record(calls_) : Status(); }
  // Ahead of the first kernel of a graph, on the stream that is recorded.
  Status beforeGraph(DeviceStream recorded);
  // Behind each kernel of a graph.
  Status afterGraphs(DeviceStream recorded) { return event_->recordInReplays(recorded); }

  // Whether a graph has kernels of the group, or had some.
  bool hasGraphs() const { return event_ != nullptr; }
  // Whether the last kernel that has been launched is over.
  Result<bool> isOver() const { return event_ ? event_->hasHappened() : Result<bool>(true); }

 private:
  Accelerator& accelerator_;
  const DeviceStream calls_;
  std::unique_ptr<ReplayEvent> event_;  // null: no graph has kernels of the group
};

}  // namespace mooncake
