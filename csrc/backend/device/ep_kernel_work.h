#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include "backend/ep_work.h"
#include "collectives/peer/peer_guard.h"

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
    // Enqueues the receiving kernel of the operation with this number of those that were sent. Empty:
    // one kernel does all.
    std::function<void(uint64_t sent)> receive;
  };
  explicit EpKernelWork(Of of) : of_(std::move(of)) {}
  ~EpKernelWork() override;

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
  // Makes the current stream wait for the stream's work so far.
  void join();

 private:
  void throwIfFailed() const;

  void block() const;

  const Of of_;
  uint64_t number_ = 0;
  uint64_t sent_ = 0;
  std::optional<c10::Event> done_;  // once the receiving kernel is enqueued
};

}  // namespace mooncake
