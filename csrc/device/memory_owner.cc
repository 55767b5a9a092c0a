#include "device/memory_owner.h"

#include <string>

#include "device/accelerators.h"
#include "device/cuda/driver_loaded.h"

namespace mooncake {
namespace {

// In a forked child kAborted says that the devices belong to the parent: no memory here is theirs.
Result<MemoryOwner> ask(Accelerator& accelerator, const void* address) {
  const auto place = accelerator.placeOf(address);
  if (place.ok() && place->kind == MemoryKind::kDevice)
    return MemoryOwner{.accelerator = &accelerator, .device = place->device};
  if (place.ok() || place.error().code == ErrorCode::kAborted) return MemoryOwner{};
  return place.error();
}

Result<MemoryOwner> ownerOf(const void* address) {
#ifdef MOONCAKE_WITH_SIM
  const auto fake = openAccelerator("fake");
  if (fake.ok()) {
    auto owner = ask(**fake, address);
    if (!owner.ok() || *owner) return owner;
  }
#endif
  if (!isCudaLoaded()) return MemoryOwner{};
  const auto cuda = openAccelerator("cuda");
  // A driver that cannot be opened has given no memory to this process.
  return cuda.ok() ? ask(**cuda, address) : MemoryOwner{};
}

}  // namespace

Result<MemoryOwner> ownerOf(const void* address, size_t bytes) {
  auto first = ownerOf(address);
  if (!first.ok() || bytes == 0) return first;
  const auto last = ownerOf(static_cast<const std::byte*>(address) + bytes - 1);
  if (!last.ok() || *last == *first) return last.ok() ? first : last;
  return Error{ErrorCode::kInvalidArgument,
               "the range of " + std::to_string(bytes) +
                   " bytes does not lie in memory of one owner: its first byte belongs to " +
                   (*first ? "device " + std::to_string(first->device) : "the host") +
                   ", its last one to " +
                   (*last ? "device " + std::to_string(last->device) : "the host")};
}

}  // namespace mooncake
