#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/result.h"
#include "base/wait.h"
#include "device/accelerator.h"
#include "kernels/proxy/command.h"
#include "proxy/command_ring.h"

namespace mooncake::proxy {

// Memory that the host shares with kernels: rings, counts, and words that peers count up.
class ProxyMemory {
 public:
  // `tickets` is memory of the device for one ProxyTickets a rank, all zeros. Empty: pinned memory
  // is used, which makes atomic operations of a GPU slow. `counts`: the same for ProxyCounts, from
  // PeerMemory::allocateShared(). Pinned memory is used if the host cannot write them: then each
  // look of a kernel crosses the bus.
  // No accelerator: only threads of the host push commands, and the memory is pageable.
  static Result<std::unique_ptr<ProxyMemory>> create(Accelerator* accelerator, uint32_t ranks,
                                                     uint32_t slots, uint32_t signalWords,
                                                     std::span<std::byte> tickets,
                                                     std::span<std::byte> counts);
  ~ProxyMemory();
  ProxyMemory(const ProxyMemory&) = delete;
  ProxyMemory& operator=(const ProxyMemory&) = delete;

  const kernels::ProxyView& view() const { return view_; }
  CommandRing ringOf(uint32_t peer) const;
  // Ok: the counts are memory of the device. Else why they are not.
  const Status& countsMapped() const { return countsMapped_; }
  // A doorbell, then the signal words.
  std::span<std::byte> signals() const { return signals_; }

 private:
  void mapCounts(std::span<std::byte> counts);

  ProxyMemory(Accelerator* accelerator, std::span<std::byte> pinned)
      : accelerator_(accelerator), pinned_(pinned) {}

  Accelerator* const accelerator_;
  const std::span<std::byte> pinned_;
  kernels::ProxyView view_{};
  kernels::ProxyCounts* counts_ = nullptr;  // where the host writes them
  std::span<std::byte> mappedCounts_;
  Status countsMapped_{ErrorCode::kUnsupported, "the device's memory was not given"};
  std::span<std::byte> signals_;
};

}  // namespace mooncake::proxy
