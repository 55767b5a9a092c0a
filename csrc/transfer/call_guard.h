#pragma once

#include "base/fork.h"
#include "base/log.h"
#include "transfer/transfer_engine.h"

namespace mooncake::transfer {

// Counts the callers inside an engine. Converts to false if the engine is closed, or if this
// process is a forked child.
class TransferEngine::Call {
 public:
  explicit Call(const TransferEngine& engine) {
    const bool isOwn = engine.forkGeneration_ == forkGeneration();
    if (isOwn && engine.calls_.enter()) {
      gate_ = &engine.calls_;
      return;
    }
    log(LogLevel::kWarning, engine.logName_,
        isOwn ? "a call after the engine was closed"
              : "a call in a forked child: an engine works in the process that made it");
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() {
    if (gate_) gate_->leave();
  }
  explicit operator bool() const { return gate_ != nullptr; }

 private:
  Gate* gate_ = nullptr;
};

}  // namespace mooncake::transfer
