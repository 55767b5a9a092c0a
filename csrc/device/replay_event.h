#pragma once

#include "device/accelerator.h"

namespace mooncake {

// An event that a graph records, or waits for, in each of its replays. Events of createEvent() are
// of this class if the accelerator can record graphs.
class ReplayEvent : public DeviceEvent {
 public:
  // For a stream that is recorded into a graph. A replay waits for the last record() before
  // it, also for a record() of another replay.
  virtual Status recordInReplays(DeviceStream stream) = 0;
  virtual Status blockInReplays(DeviceStream stream) = 0;
};

}  // namespace mooncake
