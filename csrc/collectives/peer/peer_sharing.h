#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/result.h"
#include "collectives/peer/allocation_exchange.h"
#include "device/accelerator.h"
#include "device/peer_memory.h"
#include "group/group.h"
#include "kernels/signals.h"

namespace mooncake {

// Ranks of one host that map each other's memory of a device, and signal each other by kernels.
// Thread-safe.
class PeerSharing {
 public:
  // Makes a group for this object alone, which calls the function with each view. Collective.
  using MakeGroup =
      std::function<std::unique_ptr<Group>(std::function<void(const GroupView&)> onView)>;
  struct Settings {
    int device = 0;
    std::chrono::milliseconds timeout{};  // of calls, and of signals that have none of their own
  };
  // Collective. All ranks return ok, or all return an error that says why. A rank that cannot take
  // part has an error in place of the accelerator.
  static Result<std::shared_ptr<PeerSharing>> make(const MakeGroup& makeGroup,
                                                   Result<Accelerator*> accelerator,
                                                   const Settings& settings);
  // No kernel of signal() may run.
  ~PeerSharing();
  PeerSharing(const PeerSharing&) = delete;
  PeerSharing& operator=(const PeerSharing&) = delete;

  int rank() const { return control_->rank(); }
  int size() const { return control_->size(); }

  // Returns the memory of each rank, at addresses of this device. `memory` is that of `own`.
  // Collective, as make() is.
  Result<std::vector<std::span<std::byte>>> mapAll(const SharedAllocation& own,
                                                   std::span<std::byte> memory);
  // For memory of other ranks. No work uses it any more.
  void unmap(std::span<std::byte> memory);

  struct Signals {
    const char* name;  // of the call, for errors
    uint32_t channel;
    uint64_t puts, waits;               // bits of ranks
    std::chrono::milliseconds timeout;  // 0: that of the settings
  };
  // Enqueues signals. `pads`: each rank's words, see kernels/signals.h. After a rank has been waited
  // for in vain, all calls return an error that names it.
  Status signal(DeviceStream stream, const std::vector<uint32_t*>& pads, const Signals& signals);

 private:
  class LostRanks;

  PeerSharing(Accelerator* accelerator, const Settings& settings);
  Status prepare();
  Status mapTheirs(const std::vector<SharedAllocation>& shared,
                   std::vector<std::span<std::byte>>& all);
  Status missed(const char* name) const;

  Accelerator* const accelerator_;  // null: this rank cannot take part
  const Settings settings_;
  const std::shared_ptr<LostRanks> lost_;
  std::unique_ptr<Group> control_;
  std::mutex controlMutex_;  // one operation of control_ at a time
  std::span<std::byte> pinned_;
  kernels::SignalWords* words_ = nullptr;
};

}  // namespace mooncake
