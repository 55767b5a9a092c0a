#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include <c10/core/Stream.h>

#include "backend/device/kernel_end.h"
#include "backend/experts/ep_work.h"

namespace mooncake {

// A dispatch or combine that kernels do. Its error is raised by wait(), if it is known by then, and
// else by later calls of the buffer.
class EpKernelWork final : public EpWork {
 public:
  struct Of {
    std::shared_ptr<void> kernels;  // owns the guard
    const PeerGuard& guard;
    c10::Stream stream;  // of the kernels
    bool blocks;         // wait() waits on the host
    // Into a graph. Then it runs when that is replayed, and errors are raised by later calls.
    bool isRecorded = false;
    // Enqueues the receiving kernel of the sent operation with this number. Empty:
    // one kernel does all.
    std::function<void(uint64_t sent)> receive;
  };
  explicit EpKernelWork(Of of) : of_(std::move(of)) {}

  // It was sent last. `number`: of its call; `sent`: see Of::receive.
  void sent(uint64_t number, uint64_t sent = 0) {
    number_ = number;
    sent_ = sent;
  }

  bool isCompleted() const override;
  void wait() override;
  void synchronize() override;
  // Enqueues the receiving kernel behind the current stream's work so far, unless that was done.
  void receive();

 private:
  const Of of_;
  uint64_t number_ = 0;
  uint64_t sent_ = 0;
  std::optional<KernelEnd> end_;  // once the receiving kernel is enqueued
};

}  // namespace mooncake
