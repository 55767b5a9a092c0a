#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/deadline.h"
#include "base/result.h"
#include "device/accelerator.h"
#include "device/peer_mappings.h"
#include "group/group.h"
#include "kernels/group_state.h"
#include "peers/allocation_exchange.h"
#include "peers/peer_proxy.h"

namespace mooncake {

// The memory by which kernels of a group's ranks work together: a part of each rank on its device, an
// inbox for each rank on another host, and words that a kernel shares with its host. The ranks of a
// host map each other's parts and inboxes.
class PeerArea {
 public:
  struct Settings {
    unsigned banks = kernels::kMostBanks;  // see kernels::GroupState
    size_t bankBytes = 0;                  // of inputs that are exchanged at once
    // Bytes of them that a rank on another host needs. 0: all ranks must be on one host.
    size_t inboxBankBytes = 0;
    std::chrono::nanoseconds patience{};  // see kernels::GroupState
    std::chrono::nanoseconds decision{};
  };

  // Collective over the group, whose ranks may use different devices. All members return ok or all
  // return an error, which says why. `stream` is one of the device; the call waits for its work.
  // Members that were lost before have no part. The other members begin without them.
  static Result<std::unique_ptr<PeerArea>> make(Group& group, Accelerator& accelerator,
                                                DeviceStream stream, const Settings& settings,
                                                Deadline deadline);
  // No kernel may use the area any more. Other ranks of the host may: their mappings keep the memory
  // alive.
  ~PeerArea();
  PeerArea(const PeerArea&) = delete;
  PeerArea& operator=(const PeerArea&) = delete;

  kernels::GroupState* state() const { return state_; }  // an address of the device
  kernels::HostWords& words() const { return *words_; }
  size_t bankBytes() const { return settings_.bankBytes; }
  size_t inboxBankBytes() const { return settings_.inboxBankBytes; }
  // The way to ranks on other hosts. Null: there are none.
  PeerProxy* proxy() const { return proxy_.get(); }
  // The memory that this rank publishes for the exchange with the serial number, on the device.
  std::byte* bank(uint64_t serial) const {
    return parts_[size_t(rank_)].data() + kernels::bankOf(serial, settings_.banks) * bankStride();
  }

 private:
  PeerArea(Accelerator& accelerator, DeviceStream stream, const Settings& settings)
      : accelerator_(accelerator), stream_(stream), settings_(settings) {}

  // Offsets in a part, and sizes.
  size_t bankStride() const;
  size_t outgoingOffset() const { return settings_.banks * bankStride(); }
  size_t signalsOffset() const;
  size_t stateOffset() const;
  size_t ticketsOffset() const;
  size_t countsOffset() const;
  size_t inboxBankStride() const;
  size_t inboxBytes() const;
  // Bits of the ranks on other hosts than `rank`, without lost ones.
  uint64_t remoteOf(int rank) const;
  // Offset of the inbox for `from` in the inboxes of `rank`.
  uint64_t inboxAt(int rank, int from) const;

  Result<SharedAllocation> allocate(const Group& group);
  // By rank; empty for ranks on other hosts and for lost ranks.
  using Memory = std::vector<std::span<std::byte>>;
  Status mapAll(std::vector<SharedAllocation>& allocations, Memory& memory);
  Status clearMails();
  Status shareInboxes(Group& group, Deadline deadline);
  Result<SharedAllocation> allocateInboxes(const Group& group);
  Status meetRemote(Group& group, Deadline deadline);
  Status clear(std::span<std::byte> memory);
  Status initialize();

  Accelerator& accelerator_;
  const DeviceStream stream_;
  const Settings settings_;
  std::optional<PeerMappings> mappings_;
  int rank_ = 0;
  uint64_t present_ = 0;         // bits of the ranks that were not lost before
  std::vector<uint64_t> hosts_;  // by rank: bits of the ranks on its host
  Memory parts_;
  Memory inboxes_;  // of all remote ranks, at the same places in each
  kernels::GroupState* state_ = nullptr;
  std::span<std::byte> pinned_;
  kernels::HostWords* words_ = nullptr;
  std::unique_ptr<PeerProxy> proxy_;  // ends before the memory
};

}  // namespace mooncake
