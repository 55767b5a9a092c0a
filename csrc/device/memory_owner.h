#pragma once

#include <cstddef>

#include "base/result.h"
#include "device/accelerator.h"

namespace mooncake {

// The device that owns memory, and the accelerator that reaches it. No accelerator: the processor
// reaches the memory by load and store.
struct MemoryOwner {
  Accelerator* accelerator = nullptr;
  int device = -1;

  explicit operator bool() const { return accelerator != nullptr; }
  friend bool operator==(const MemoryOwner&, const MemoryOwner&) = default;
};

// Returns the owner of a range. Loads no driver and makes no context: a driver that this process has
// not loaded owns nothing here. Without a driver it costs about 1 us. kInvalidArgument: the range
// begins in memory of one owner and ends in memory of another. kSystem: the device's context is
// lost, so its driver does not answer.
Result<MemoryOwner> ownerOf(const void* address, size_t bytes);

}  // namespace mooncake
