#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/deadline.h"
#include "base/dtype.h"
#include "base/result.h"
#include "collectives/peer/peer_area.h"
#include "collectives/peer/peer_guard.h"
#include "collectives/peer/replay_order.h"
#include "collectives/reduce_cpu.h"
#include "device/accelerator.h"
#include "group/group.h"
#include "kernels/collectives.h"
#include "kernels/kernel_id.h"

namespace mooncake {

// The collectives of a group whose ranks are on one host, as kernels on memory of devices that all
// of them map. Results have the bits and the contributors that the collectives on host memory have.
// Addresses are the device's. Calls enqueue a kernel on the stream and return the number of the
// operation; one thread at a time.
class PeerCollectives {
 public:
  struct Settings {
    size_t halfBytes = 0;  // of inputs that are exchanged at once
    std::chrono::milliseconds timeout{};
  };

  // Collective over `control`, a group of the ranks for this object alone, whose view `view` shows.
  // All members return ok, or all return an error that says why. Waits for work of the stream.
  // A rank that cannot take part has an error in place of the accelerator.
  static Result<std::unique_ptr<PeerCollectives>> make(std::unique_ptr<Group> control,
                                                       std::shared_ptr<ViewFeed> view,
                                                       Result<Accelerator*> accelerator,
                                                       DeviceStream stream,
                                                       const Settings& settings, Deadline deadline);
  // Waits for kernels, which end within the timeout. If graphs have some, the memory that they use
  // stays: replays that come later end at once, without a result.
  ~PeerCollectives();
  PeerCollectives(const PeerCollectives&) = delete;
  PeerCollectives& operator=(const PeerCollectives&) = delete;

  // Whether calls with so many parts of inputs go by kernels. The same on all ranks.
  bool takes(size_t parts) const { return area_->halfBytes() / parts >= kSmallestPiece; }
  // Whether a call needs several exchanges. Parts have so many bytes. The same on all ranks.
  bool hasPieces(size_t bytes, size_t parts) const { return bytes * parts > area_->halfBytes(); }

  // Contiguous tensors. Where a call has a part for each rank, they are in one tensor or in one for
  // each rank. A rank that gives or takes nothing has no inputs or no outputs.
  struct Tensors {
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    void* scratch = nullptr;  // as large as the output, if the call has pieces and one such output
    size_t count = 0;         // elements of a part
    DType dtype = DType::kFloat32;
  };
  Result<uint64_t> allreduce(const Tensors& tensors, ReduceKind kind, Deadline deadline);
  Result<uint64_t> reduceScatter(const Tensors& tensors, ReduceKind kind, Deadline deadline);
  Result<uint64_t> allgather(const Tensors& tensors, Deadline deadline);
  // If the root is lost, these change nothing on any rank; see PeerGuard::contributors().
  Result<uint64_t> reduce(const Tensors& tensors, ReduceKind kind, int root, Deadline deadline);
  Result<uint64_t> broadcast(const Tensors& tensors, int root, Deadline deadline);
  Result<uint64_t> gather(const Tensors& tensors, int root, Deadline deadline);
  Result<uint64_t> scatter(const Tensors& tensors, int root, Deadline deadline);

  PeerGuard& guard() const { return *guard_; }
  // Waits until the kernels of all calls and replays so far have ended, or for the deadline.
  void drain(Deadline deadline) const;

  // While it lives, calls launch their kernels on a stream that is recorded into a graph. The host
  // does not count these: they return 0.
  class Recording {
   public:
    // `isNewGraph`: no call has been recorded into this graph.
    Recording(PeerCollectives& peers, DeviceStream stream, bool isNewGraph) : peers_(peers) {
      peers_.recording_ = stream;
      peers_.isOrdered_ = peers_.isOrdered_ && !isNewGraph;
    }
    ~Recording() { peers_.recording_.reset(); }
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;

   private:
    PeerCollectives& peers_;
  };

 private:
  struct Call;
  static constexpr size_t kSmallestPiece = 16;  // bytes

  PeerCollectives(std::unique_ptr<Group> control, std::shared_ptr<ViewFeed> view,
                  Accelerator& accelerator, DeviceStream stream)
      : control_(std::move(control)),
        view_(std::move(view)),
        accelerator_(accelerator),
        stream_(stream),
        order_(accelerator, stream) {}

  size_t pieceOf(const Call& call, size_t bytes) const;
  kernels::Exchange exchangeOf(const Call& call, const Tensors& tensors, Deadline deadline) const;
  Result<uint64_t> reduceAny(const Call& call, const Tensors& tensors, size_t part,
                             Deadline deadline);
  Result<uint64_t> moveAny(const Call& call, const Tensors& tensors, uint64_t sources, size_t part,
                           Deadline deadline);
  template <typename Arguments>
  Result<uint64_t> enqueue(KernelId kernel, const Call& call, size_t work, Arguments& arguments,
                           Deadline deadline);
  Status meet(const char* name, Deadline deadline);
  Status launchCall(const KernelLaunch& launch);
  Status record(const KernelLaunch& launch);
  Status start(std::chrono::milliseconds timeout);
  Status agreeOnBlocks(Deadline deadline);
  Status acknowledge();

  const std::unique_ptr<Group> control_;
  const std::shared_ptr<ViewFeed> view_;
  Accelerator& accelerator_;
  const DeviceStream stream_;
  std::unique_ptr<PeerArea> area_;
  std::unique_ptr<PeerGuard> guard_;
  ReplayOrder order_;
  std::optional<DeviceStream> recording_;
  bool isOrdered_ = false;   // the graph that is recorded begins in the order of replays
  uint64_t decisionNs_ = 0;  // see kernels::Exchange; of a graph's operation
  uint32_t mostBlocks_ = 1;  // of a kernel; the same on all ranks
};

}  // namespace mooncake
