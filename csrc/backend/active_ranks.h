#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

#include "group/flush_owner.h"

namespace mooncake {

// The int32 tensor in which a group marks its ranks: 1 = active, 0 = lost. Elements beyond the
// largest size that the group has had are not touched. A tensor of a device has a twin in pinned host memory, which is
// always up to date.
class ActiveRanks {
 public:
  // `shown`: a tensor of the CPU, the caller's or an undefined one.
  ActiveRanks(const at::Tensor& shown, int size);
  virtual ~ActiveRanks() = default;

  // From now on, lost ranks stay marked until show() is called for another reason than a loss.
  void keepLost() { keepsLost_ = true; }
  // Marks the ranks of the view in host memory. Any thread; never waits. A concurrent reader sees
  // each element before or after the change.
  void show(const GroupView& view, bool isLoss = false);
  // The marked ranks. Null without keepLost().
  std::shared_ptr<const GroupView> kept() const;
  // Brings a tensor of a device up to date, and waits for that, a second at most. Does not throw:
  // logs that a device does not take it. Not for threads that liveness depends on.
  virtual void push() {}
  // The same once no other ranks than these are shown, which it waits for as long.
  virtual void pushAfter(uint64_t /*active*/) {}

  const at::Tensor& tensor() const { return shown_; }
  const at::Tensor& onHost() const { return host_; }  // `tensor()`, if that is the CPU's

 protected:
  ActiveRanks(at::Tensor shown, at::Tensor host, int size);
  static at::Tensor ones(int size, bool isPinned);
  int size() const { return size_.load(std::memory_order_relaxed); }
  uint64_t changes() const { return changes_.load(std::memory_order_acquire); }
  // Whether no other ranks than these are shown in host memory.
  bool areOnly(uint64_t active) const;

 private:
  std::atomic<int> size_;
  std::atomic<bool> keepsLost_{false};
  const at::Tensor shown_;
  const at::Tensor host_;
  std::atomic<uint64_t> changes_{0};
};

}  // namespace mooncake
