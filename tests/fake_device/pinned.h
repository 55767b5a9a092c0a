#pragma once

#include <c10/core/Allocator.h>

namespace fake_device {

// Pinned host memory for torch, straight from the devices. To free it does not wait: it stays valid
// until the streams have passed the work that they hold at that moment. Thread-safe.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;
};

PinnedAllocator& pinnedAllocator();

}  // namespace fake_device
