#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include <ATen/core/Tensor.h>

#include "backend/active_ranks.h"
#include "backend/device/own_stream.h"
#include "backend/device/stream_mark.h"
#include "base/deadline.h"

namespace mooncake {

// ActiveRanks in a tensor of a device.
class DeviceRanks final : public ActiveRanks {
 public:
  // `shown`: the caller's tensor. Earlier work of the current stream may still fill it.
  DeviceRanks(const at::Tensor& shown, int size);

  void push() override;
  void pushAfter(uint64_t active) override;

 private:
  void copyToDevice();
  // Returns a stream that no other one holds up, if an accelerator drives the device.
  c10::Stream stream(Deadline deadline);

  const StreamMark isFilled_;  // of the caller's stream
  std::mutex mutex_;           // guards everything below
  uint64_t pushed_ = 0;
  std::optional<OwnStream> stream_;  // torch alone drives the device
};

// Makes the tensor of a group with this many ranks. `shown`: the caller's tensor, of any device, or an
// undefined one.
std::shared_ptr<ActiveRanks> makeActiveRanks(const at::Tensor& shown, int size);

}  // namespace mooncake
