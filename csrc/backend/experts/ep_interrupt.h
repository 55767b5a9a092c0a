#pragma once

#include <string>

#include "backend/signals.h"
#include "group/group.h"

namespace mooncake {

// Runs signal handlers during a call of a buffer. After an interrupted call no rank can tell how
// the call would have ended, so the buffer becomes unusable.
class EpInterrupt final : public Interruptible {
 public:
  explicit EpInterrupt(Group& group) : group_(group) {}

 private:
  void giveUp(const std::string& why) override {
    group_.fail(
        {ErrorCode::kAborted, "a call was interrupted by " + why + ": make the buffer again"});
  }
  Group& group_;
};

}  // namespace mooncake
