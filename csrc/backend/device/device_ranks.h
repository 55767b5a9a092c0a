#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include "backend/active_ranks.h"
#include "backend/device/own_stream.h"
#include "backend/device/stream_mark.h"
#include "base/deadline.h"
#include "base/mutex.h"

namespace mooncake {

// ActiveRanks in a tensor of a device.
class DeviceRanks final : public ActiveRanks {
 public:
  // `shown`: the caller's tensor. Earlier work of the current stream may still fill it.
  DeviceRanks(const at::Tensor& shown, int size);

  void push() override;
  void pushAfter(uint64_t active) override;

 private:
  void copyToDevice() REQUIRES(mutex_);
  // Returns a stream that no other one holds up, if an accelerator drives the device.
  c10::Stream stream(Deadline deadline) REQUIRES(mutex_);

  const StreamMark isFilled_;  // of the caller's stream
  Mutex mutex_;
  uint64_t pushed_ GUARDED_BY(mutex_) = 0;
  std::optional<OwnStream> stream_ GUARDED_BY(mutex_);  // torch alone drives the device
};

// Makes the tensor of a group with this many ranks. `shown`: the caller's tensor, of any device, or an
// undefined one.
std::shared_ptr<ActiveRanks> makeActiveRanks(const at::Tensor& shown, int size);

}  // namespace mooncake
