#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/dtype.h"
#include "base/result.h"
#include "collectives/reduce_cpu.h"
#include "device/accelerator.h"
#include "group/group.h"
#include "kernels/all_to_all.h"
#include "kernels/collectives.h"
#include "kernels/kernel_id.h"
#include "peers/peer_misfits.h"
#include "peers/peer_queue.h"
#include "peers/peer_table.h"

namespace mooncake {

// The collectives of a group, as kernels on memory of devices that its ranks map or write to by
// proxies. Results have the bits and the contributors that the collectives on host memory have.
// Addresses are the device's. Calls enqueue a kernel on the stream and return the number of the
// operation; one thread at a time.
class PeerCollectives {
 public:
  struct Settings {
    size_t bankBytes = 0;  // of inputs that are exchanged at once
    PeerTable table;       // the same on all ranks
    std::chrono::milliseconds timeout{};
    std::function<void(uint64_t active)> onLoss = nullptr;  // see PeerGuard::Functions
  };
  // See PeerQueue::make().
  static Result<std::unique_ptr<PeerCollectives>> make(std::unique_ptr<Group> control,
                                                       std::shared_ptr<ViewFeed> view,
                                                       Result<Accelerator*> accelerator,
                                                       DeviceStream stream, Settings settings,
                                                       Deadline deadline);

  // Whether calls with `parts` parts of inputs go by kernels. The same on all ranks.
  bool takes(size_t parts) const { return bankBytes() / parts >= kSmallestPiece; }
  // Whether a call needs several exchanges. `bytes`: of a part. The same on all ranks.
  bool hasPieces(size_t bytes, size_t parts) const { return bytes * parts > bankBytes(); }

  // Contiguous tensors. Where a call has a part for each rank, they are in one tensor or in one for
  // each rank. A rank that gives or takes nothing has no inputs or no outputs.
  struct Tensors {
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    void* scratch = nullptr;  // as large as the output, if the call has pieces and one such output
    size_t count = 0;         // elements of a part
    DType dtype = DType::kFloat32;
  };
  // What a kernel must know of a collective, the same on all ranks.
  struct Verb {
    const char* name;
    bool isPerRank = false;  // inputs have a part for each rank, which reads its own
    bool isToRoot = false;   // only the root reads
    bool isFromRoot = false;
    bool mayBeTwoShot = false;
  };
  // Where there is a root, and it is lost, these two change nothing on any rank; see
  // PeerGuard::contributors(). `root` is -1 where there is none.
  Result<uint64_t> reduce(const Verb& verb, const Tensors& tensors, ReduceKind kind, int root,
                          Deadline deadline);
  Result<uint64_t> move(const Verb& verb, const Tensors& tensors, int root, Deadline deadline);
  // Bytes for each rank and from each rank. One size in `sends`: all ranks get the one input.
  struct Splits {
    std::vector<size_t> sends, receives;
  };
  // Each rank knows only its own splits. If they do not fit, the call changes nothing on any rank;
  // see misfits(). Inputs and outputs do not overlap. `count` is not used.
  Result<uint64_t> exchange(const Verb& verb, const Tensors& tensors, const Splits& splits,
                            Deadline deadline);

  int size() const { return queue_->group().size(); }  // ranks, lost ones included
  PeerQueue& queue() const { return *queue_; }
  PeerGuard& guard() const { return queue_->guard(); }
  PeerMisfits& misfits() { return misfits_; }

 private:
  struct Call;
  static constexpr size_t kSmallestPiece = 16;  // bytes

  PeerCollectives(std::unique_ptr<PeerQueue> queue, PeerTable table)
      : queue_(std::move(queue)),
        table_(std::move(table)),
        misfits_(queue_->group(), queue_->area().words()) {}

  // Bytes of an input that are exchanged at once. The memory also has room for a table of splits.
  size_t bankBytes() const { return queue_->area().bankBytes() - kernels::kSplitBytes; }
  size_t pieceOf(const Call& call, size_t bytes) const;
  Call callOf(const Verb& verb, const Tensors& tensors, ReduceKind kind, int root) const;
  bool isTwoShot(size_t bytes) const;
  kernels::Exchange exchangeOf(const Call& call, const Tensors& tensors, Deadline deadline) const;
  template <typename Arguments>
  Result<uint64_t> enqueue(KernelId kernel, const Call& call, size_t work, Arguments& arguments,
                           Deadline deadline);
  Status meet(const char* name, Deadline deadline);

  const std::unique_ptr<PeerQueue> queue_;
  const PeerTable table_;
  PeerMisfits misfits_;
};

}  // namespace mooncake
