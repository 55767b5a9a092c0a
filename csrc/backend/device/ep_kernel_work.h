#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <c10/core/Event.h>

#include "backend/device/ep_kernels.h"
#include "backend/ep_work.h"

namespace mooncake {

// A dispatch or combine that kernels do. Its error is raised by wait(), if it is known by then, and
// else by later calls of the buffer.
class EpKernelWork final : public EpWork {
 public:
  // `stream`: of its kernels. `isRecorded`: into a graph. Then it runs when that is replayed, and
  // errors are raised by later calls.
  EpKernelWork(std::shared_ptr<EpKernels> kernels, const c10::Stream& stream, bool isRecorded)
      : kernels_(std::move(kernels)), stream_(stream), isRecorded_(isRecorded) {}
  ~EpKernelWork() override;

  // It was sent last. `number`: of its call; `sent`: PeerExperts::sent() since.
  void sent(uint64_t number, uint64_t sent) {
    number_ = number;
    sent_ = sent;
  }

  bool isCompleted() const override;
  void wait() override;
  void synchronize() override;
  // Enqueues the receiving kernel behind the current stream's work so far, unless that was done.
  void receive();
  // Makes the current stream wait for the stream's work so far.
  void join();

 private:
  void throwIfFailed() const;

  void block() const;

  const std::shared_ptr<EpKernels> kernels_;
  const c10::Stream stream_;
  const bool isRecorded_;
  uint64_t number_ = 0;
  uint64_t sent_ = 0;
  std::optional<c10::Event> done_;  // once the receiving kernel is enqueued
};

}  // namespace mooncake
