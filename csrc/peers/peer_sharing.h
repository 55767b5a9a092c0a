#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/deadline.h"
#include "base/fork.h"
#include "base/mutex.h"
#include "base/result.h"
#include "device/accelerator.h"
#include "device/peer_memory.h"
#include "group/group.h"
#include "kernels/signals.h"
#include "peers/allocation_exchange.h"

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
  // Kernels of signal() may still run if the caller has words().
  ~PeerSharing();
  PeerSharing(const PeerSharing&) = delete;
  PeerSharing& operator=(const PeerSharing&) = delete;

  int rank() const { return control_->rank(); }
  int size() const { return control_->size(); }
  int device() const { return settings_.device; }

  // Memory of this rank that other ranks are to map.
  struct Offer {
    const SharedAllocation* allocation = nullptr;
    std::span<std::byte> memory;
    std::array<uint64_t, 3> layout{};  // must be the same on all ranks
    bool isKnown = false;              // this rank has a result of an earlier call
  };
  // Returns the memory of each rank, at addresses of this device; nothing if all ranks know it. A
  // rank that has nothing to offer takes part with its error. Collective, as make() is.
  Result<std::vector<std::span<std::byte>>> mapAll(const Result<Offer>& mine);
  // Keeps the words of the host that kernels of signal() use.
  std::shared_ptr<void> words() const { return words_; }

  struct Signals {
    const char* name;  // of the call, for errors
    uint32_t channel;
    uint64_t puts, waits;               // bits of ranks
    std::chrono::milliseconds timeout;  // 0: as in the settings
  };
  // Enqueues signals. `pads`: each rank's words, see kernels/signals.h. After a rank has been lost, or
  // waited for in vain, all calls return an error that names it.
  Status signal(DeviceStream stream, const std::vector<uint32_t*>& pads, const Signals& signals);
  // Ends waits of kernels, and all later calls, with this error. Does not wait.
  void fail(const Error& why);

 private:
  class LostRanks;

  PeerSharing(Accelerator* accelerator, const Settings& settings);
  // See agreeOnAll(). kPeerLost also if a member was lost before: each rank reads every rank's
  // memory.
  Status agree(const Status& mine, Deadline deadline);
  Status prepare();
  Result<bool> agreeOnOffers(const Offer& mine, Deadline deadline) REQUIRES(controlMutex_);
  Status mapTheirs(const std::vector<SharedAllocation>& shared,
                   std::vector<std::span<std::byte>>& all);
  void unmap(std::span<std::byte> memory);
  Status missed(const char* name) const;

  Accelerator* const accelerator_;  // null: this rank cannot take part
  const Settings settings_;
  const std::shared_ptr<LostRanks> lost_;
  std::unique_ptr<Group> control_;
  Mutex controlMutex_;
  uint64_t called_ GUARDED_BY(controlMutex_) = 0;  // calls of mapAll()
  std::shared_ptr<kernels::SignalWords> words_;    // in pinned memory
  const uint32_t forkGeneration_ = forkGeneration();
};

}  // namespace mooncake
