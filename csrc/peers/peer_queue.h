#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "base/result.h"
#include "device/accelerator.h"
#include "group/group.h"
#include "kernels/collectives.h"
#include "peers/peer_area.h"
#include "peers/peer_guard.h"
#include "peers/replay_order.h"

namespace mooncake {

// The kernels of a group: the memory by which they work together, their order, and the guard that
// decides for them when ranks are lost. One thread at a time.
class PeerQueue {
 public:
  static constexpr unsigned kMostThreads = 512;  // of a block: the bound in kernels/entries.cuh

  struct Settings {
    unsigned banks = kernels::kMostBanks;  // see kernels::GroupState
    size_t bankBytes = 0;                  // of data that a rank publishes for one exchange
    // Most bytes of them that a rank on another host needs. 0: all ranks must be on one host.
    size_t inboxBankBytes = 0;
    unsigned mostBlocks = 1;  // of a kernel, and so multiprocessors that it takes
    bool maySkip = false;     // operations may skip ranks that are late
    std::chrono::milliseconds timeout{};
    // See PeerGuard::Functions. Null: none.
    std::function<void(uint64_t active)> onLoss = nullptr;
  };
  // Collective over `control`, a group of the ranks for this object alone; `view` shows its view.
  // All members return ok, or all return an error that says why. Waits for work of the stream.
  // A rank that cannot take part has an error in place of the accelerator.
  static Result<std::unique_ptr<PeerQueue>> make(std::unique_ptr<Group> control,
                                                 std::shared_ptr<ViewFeed> view,
                                                 Result<Accelerator*> accelerator,
                                                 DeviceStream stream, const Settings& settings,
                                                 Deadline deadline);
  // Waits for kernels, which end within the timeout. If graphs have some, the memory that they use
  // stays: replays that come later end at once, without a result.
  ~PeerQueue();
  PeerQueue(const PeerQueue&) = delete;
  PeerQueue& operator=(const PeerQueue&) = delete;

  const Group& group() const { return *control_; }
  const PeerArea& area() const { return *area_; }
  PeerGuard& guard() const { return *guard_; }
  unsigned mostBlocks() const { return mostBlocks_; }  // the same on all ranks
  // Whether ranks are on several hosts. The same on all ranks.
  bool spansHosts() const { return area_->proxy() != nullptr; }
  // Whether a graph has kernels of the group, or had some.
  bool hasGraphs() const { return order_.hasGraphs(); }

  // An exchange of the next operation, for a call or for the graph that is being recorded.
  // `skipAfter`: so long after its kernel has begun to wait, ranks that have not begun it are
  // skipped. 0: none is.
  kernels::Exchange exchange(uint32_t call, Deadline deadline,
                             Clock::duration skipAfter = Clock::duration(0)) const;
  // Begins the next operation. Returns the call's number, and 0 for a graph.
  Result<uint64_t> begin(const std::string& name, Deadline deadline);
  // Enqueues the next kernel of the operation that has begun. An error ends the group.
  Status launch(const KernelLaunch& launch);
  // Waits until the kernels of all calls and replays so far have ended, or for the deadline.
  void drain(Deadline deadline) const;

  // While it lives, kernels are launched on a stream that is recorded into a graph. The host does not
  // count their operations.
  class Recording {
   public:
    // `isNewGraph`: no call has been recorded into this graph.
    Recording(PeerQueue& queue, DeviceStream stream, bool isNewGraph) : queue_(queue) {
      queue_.recording_ = stream;
      queue_.isOrdered_ = queue_.isOrdered_ && !isNewGraph;
    }
    ~Recording() { queue_.recording_.reset(); }
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;

   private:
    PeerQueue& queue_;
  };

 private:
  PeerQueue(std::unique_ptr<Group> control, std::shared_ptr<ViewFeed> view,
            Accelerator& accelerator, DeviceStream stream)
      : control_(std::move(control)),
        view_(std::move(view)),
        accelerator_(accelerator),
        stream_(stream),
        order_(accelerator, stream) {}

  Status start(const Settings& settings);
  Status agreeOnBlocks(Deadline deadline);
  Status acknowledge();
  Status endRings(uint64_t lost) const;
  Status record(const KernelLaunch& launch);

  const std::unique_ptr<Group> control_;
  const std::shared_ptr<ViewFeed> view_;
  Accelerator& accelerator_;
  const DeviceStream stream_;
  std::unique_ptr<PeerArea> area_;
  std::unique_ptr<PeerGuard> guard_;
  ReplayOrder order_;
  std::optional<DeviceStream> recording_;
  // Stops kernels; none: `stream_` does. No copies are on it: kernels may wait for these.
  std::optional<DeviceStream> beside_;
  bool isOrdered_ = false;   // the graph that is recorded begins in the order of replays
  uint64_t decisionNs_ = 0;  // see kernels::Exchange; of a graph's operation
  uint32_t mostBlocks_ = 1;
};

}  // namespace mooncake
