#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include "backend/device/own_stream.h"
#include "base/deadline.h"
#include "group/flush_owner.h"

namespace mooncake {

// The int32 tensor in which a group marks its ranks: 1 = active, 0 = lost. Elements beyond the
// group's size are not touched. A tensor of a device has a twin in pinned host memory, which is
// always up to date.
class ActiveRanks {
 public:
  // `shown`: the caller's tensor, or an undefined one. Earlier work of the current stream may still
  // fill it.
  ActiveRanks(at::Tensor shown, int size);
  // Drops the event while its device is the current one: torch would make a context on another.
  ~ActiveRanks();

  // Marks the ranks of the view in host memory. Any thread; never waits. A concurrent reader sees
  // each element before or after the change.
  void show(const GroupView& view);
  // Brings a tensor of a device up to date, and waits for that, a second at most. Does not throw:
  // logs that a device does not take it. Not for threads that liveness depends on.
  void push();
  // The same once no other ranks than these are shown, which it waits for as long.
  void pushAfter(uint64_t active);

  const at::Tensor& tensor() const { return shown_; }
  const at::Tensor& onHost() const { return host_; }  // `tensor()`, if that is the CPU's

 private:
  void copyToDevice();
  // Returns a stream that no other one holds up, if an accelerator drives the device.
  c10::Stream stream(Deadline deadline);

  const int size_;
  const at::Tensor shown_;
  const at::Tensor host_;
  std::atomic<uint64_t> changes_{0};
  std::mutex mutex_;  // guards everything below
  uint64_t pushed_ = 0;
  std::optional<OwnStream> stream_;     // torch alone drives the device
  std::optional<c10::Event> isFilled_;  // the caller's stream has come here
};

}  // namespace mooncake
