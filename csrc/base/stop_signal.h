#pragma once

#include <memory>

#include "base/fd.h"
#include "base/result.h"

namespace mooncake {

// Ends waits for sockets. A poller adds the descriptor to its set; it is readable once stop() has
// been called. Any thread.
class StopSignal {
 public:
  static Result<std::unique_ptr<StopSignal>> make();
  void stop();  // cannot be undone
  bool isStopped() const;
  int descriptor() const { return event_.get(); }

 private:
  explicit StopSignal(Fd event) : event_(std::move(event)) {}
  const Fd event_;
};

}  // namespace mooncake
