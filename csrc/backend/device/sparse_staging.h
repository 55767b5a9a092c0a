#pragma once

#include "backend/device/host_staging.h"

namespace mooncake {

// The sum of sparse tensors of a device. Its size is known when it is there, so the copy to the
// device is enqueued then.
class SparseStaging final : public HostStaging {
 public:
  // `stream`: waits for the caller's stream only.
  SparseStaging(std::shared_ptr<GroupStreams> streams, const c10::Stream& stream,
                std::chrono::milliseconds limit)
      : HostStaging(std::move(streams), stream, limit) {}
  ~SparseStaging() override;

  // Returns the copy of the tensor that becomes the sum. Adds up elements of one index first, for
  // which torch may wait for the device. Throws.
  at::Tensor sparse(const at::Tensor& tensor, const char* what);

  bool isOver() const override { return isDone(); }
  void block() override;

 private:
  void copyResults() override;

  at::Tensor tensor_;
  at::Tensor host_;
};

}  // namespace mooncake
