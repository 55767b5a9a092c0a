#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/deadline.h"
#include "base/dtype.h"
#include "base/result.h"
#include "collectives/peer/peer_area.h"
#include "collectives/peer/peer_guard.h"
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
    size_t halfBytes = 0;  // largest input of a call
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
  // Waits for kernels, which end within the timeout.
  ~PeerCollectives();
  PeerCollectives(const PeerCollectives&) = delete;
  PeerCollectives& operator=(const PeerCollectives&) = delete;

  // Whether a call with an input of so many bytes goes by kernels. The same on all ranks.
  bool takes(size_t bytes) const { return bytes <= area_->halfBytes(); }

  struct Tensor {
    const void* input = nullptr;
    void* output = nullptr;
    size_t count = 0;  // elements of the smaller one of input and output
    DType dtype = DType::kFloat32;
  };
  Result<uint64_t> allreduce(const Tensor& tensor, ReduceKind kind, Deadline deadline);
  Result<uint64_t> reduceScatter(const Tensor& tensor, ReduceKind kind, Deadline deadline);
  Result<uint64_t> allgather(const Tensor& tensor, Deadline deadline);

  PeerGuard& guard() const { return *guard_; }

 private:
  struct Shape;
  struct Call;

  PeerCollectives(std::unique_ptr<Group> control, std::shared_ptr<ViewFeed> view,
                  Accelerator& accelerator, DeviceStream stream)
      : control_(std::move(control)),
        view_(std::move(view)),
        accelerator_(accelerator),
        stream_(stream) {}

  Result<uint64_t> reduceAny(const Call& call, const Tensor& tensor, size_t inputs, size_t first,
                             size_t outputs, Deadline deadline);
  Result<uint64_t> moveAny(const Call& call, const Tensor& tensor, size_t inputs, uint64_t sources,
                           size_t offset, size_t stride, Deadline deadline);
  template <typename Arguments>
  Result<uint64_t> enqueue(KernelId kernel, const Call& call, size_t work, Arguments& arguments,
                           Deadline deadline);
  Status start(std::chrono::milliseconds timeout);
  Status agreeOnBlocks(Deadline deadline);
  Status acknowledge();

  const std::unique_ptr<Group> control_;
  const std::shared_ptr<ViewFeed> view_;
  Accelerator& accelerator_;
  const DeviceStream stream_;
  std::unique_ptr<PeerArea> area_;
  std::unique_ptr<PeerGuard> guard_;
  uint32_t mostBlocks_ = 1;  // of a kernel; the same on all ranks
};

}  // namespace mooncake
