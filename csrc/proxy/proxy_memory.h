#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/result.h"
#include "base/wait.h"
#include "device/accelerator.h"
#include "kernels/proxy/command.h"

namespace mooncake::proxy {

// Pinned memory that the host shares with kernels: rings, counts, and words that peers count up.
class ProxyMemory {
 public:
  // `tickets` is memory of the device for one ProxyTickets a rank, all zeros. Empty: pinned memory
  // is used, which makes atomic operations of a GPU slow.
  // No accelerator: only threads of the host push commands, and the memory is pageable.
  static Result<std::unique_ptr<ProxyMemory>> create(Accelerator* accelerator, uint32_t ranks,
                                                     uint32_t slots, uint32_t signalWords,
                                                     std::span<std::byte> tickets);
  ~ProxyMemory();
  ProxyMemory(const ProxyMemory&) = delete;
  ProxyMemory& operator=(const ProxyMemory&) = delete;

  const kernels::ProxyView& view() const { return view_; }
  std::span<kernels::ProxyCommand> slotsOf(uint32_t peer) const;
  kernels::ProxyCounts& countsOf(uint32_t peer) const { return counts_[peer]; }
  // A doorbell, then the signal words.
  std::span<std::byte> signals() const { return signals_; }

 private:
  ProxyMemory(Accelerator* accelerator, std::span<std::byte> pinned)
      : accelerator_(accelerator), pinned_(pinned) {}

  Accelerator* const accelerator_;
  const std::span<std::byte> pinned_;
  kernels::ProxyView view_{};
  kernels::ProxyCounts* counts_ = nullptr;
  std::span<std::byte> signals_;
};

}  // namespace mooncake::proxy
