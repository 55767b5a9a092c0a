#pragma once

#include <memory>

#include "base/fd.h"
#include "base/result.h"

namespace mooncake {

// Ends waits for sockets: whoever polls adds the descriptor, which is readable once stop() was
// called. Any thread.
class StopSignal {
 public:
  static Result<std::unique_ptr<StopSignal>> make();
  void stop();  // for good
  bool isStopped() const;
  int descriptor() const { return event_.get(); }

 private:
  explicit StopSignal(Fd event) : event_(std::move(event)) {}
  const Fd event_;
};

}  // namespace mooncake
