#pragma once

#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "device/accelerator.h"

namespace mooncake {

// Ends of memory that work of streams may still use. A destructor hands them over and waits for no
// device: that would spoil a capture of the program, in which Python may collect garbage at any time.
// Each end runs in a later call of runDue(), once the streams have passed. Thread-safe.
class DeferredEnds {
 public:
  // `end` runs once the work so far of these streams is over. They must exist until then. If one of
  // them is captured now, its work until a later runDue() counts, too. If the context is lost, `end`
  // never runs. The accelerator outlives the object.
  void add(Accelerator& accelerator, std::vector<DeviceStream> streams, std::function<void()> end);
  // Runs the ends whose streams have passed. Waits for no stream; an end may wait for the device.
  void runDue();
  // Number of ends that have not run.
  size_t waiting() const;

 private:
  struct One {
    Accelerator* accelerator = nullptr;
    std::vector<DeviceStream> streams;                 // without an event so far
    std::vector<std::unique_ptr<DeviceEvent>> events;  // behind the work of the other streams
    std::function<void()> end;
  };
  // Returns whether all streams have passed. Records events where that is possible now.
  static Result<bool> hasPassed(One& one);
  static void record(One& one);

  mutable Mutex mutex_;
  std::list<One> ones_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
