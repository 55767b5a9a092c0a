#pragma once

#include <functional>
#include <list>
#include <optional>
#include <string>
#include <thread>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include "base/deadline.h"
#include "base/mutex.h"

namespace mooncake {

// Streams that wait for the results of operations that failed. Such a stream copies the host memory
// of the results to its outputs in any case. So the outputs' present contents are copied to that
// memory first, once the stream has come to the wait. Only the host releases the stream: if work of
// another stream did that, the driver could run the two in the wrong order (cuStreamWaitValue32).
//
// One thread of the process, `mooncake-rescue`, waits for both steps. Thread-safe.
class Rescues {
 public:
  // How long copies of the outputs may take, once the stream waits.
  static constexpr std::chrono::seconds kForCopies{10};

  struct Rescue {
    c10::Device device;
    const char* what = "";            // the outputs, for the log
    std::function<bool()> isReached;  // whether the stream waits; throws torch's errors
    std::function<void(const c10::Stream&)> copy;  // enqueues the copies; throws
    std::function<void()> release;                 // lets the stream go on; called once
  };
  // Begins a rescue, and does not wait for it. If the device does not copy in time, the outputs are
  // undefined: the log says so. The functions are called, and dropped, on the thread. `copy` keeps the
  // host memory: it is not dropped while the device may still copy there, also after release().
  static void begin(Rescue rescue);

 private:
  struct Pending {
    Rescue rescue;
    std::optional<Deadline> copiedBy{};  // none: the stream has not come to the wait
    bool isEnqueued = false;             // some copies are, maybe not all
    std::optional<c10::Event> copied{};  // behind these
    bool isReleased = false;
  };

  static Rescues& ofProcess();
  void add(Rescue&& rescue);
  void run();
  // Returns whether the rescue is over.
  static bool advance(Pending& pending);
  static bool isOver(Pending& pending);
  static void copy(Pending& pending);
  static void release(Pending& pending);
  static void giveUp(Pending& pending, const std::string& why);

  Mutex mutex_;
  Condition changed_;
  std::list<Pending> added_ GUARDED_BY(mutex_);
  std::thread thread_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
