#include "engine/memory/device_exports.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace mooncake {

// Released, so that a peer that reads a later registration's values also sees that the mirror does
// not allow the earlier one any more.
void DeviceExports::write(size_t entry, const ExportedMemory& memory) {
  Slot& slot = slots_[entry];
  std::array<uint64_t, kMostHandleBytes / sizeof(uint64_t)> words{};
  std::memcpy(words.data(), memory.handle.data(), std::min(memory.handle.size(), sizeof(words)));
  for (size_t i = 0; i < words.size(); ++i)
    slot.handle[i].store(words[i], std::memory_order_release);
  slot.handleBytes.store(memory.handle.size(), std::memory_order_release);
  slot.allocation.store(memory.allocation, std::memory_order_release);
  slot.offset.store(memory.offset, std::memory_order_release);
  slot.bytes.store(memory.bytes, std::memory_order_release);
  slot.isOffered.store(memory.isOffered ? 1 : 0, std::memory_order_release);
}

ExportedMemory DeviceExports::read(size_t entry) const {
  const Slot& slot = slots_[entry];
  std::array<uint64_t, kMostHandleBytes / sizeof(uint64_t)> words{};
  for (size_t i = 0; i < words.size(); ++i)
    words[i] = slot.handle[i].load(std::memory_order_acquire);
  const size_t size =
      std::min<size_t>(slot.handleBytes.load(std::memory_order_acquire), sizeof(words));
  return {.handle = std::string(reinterpret_cast<const char*>(words.data()), size),
          .allocation = slot.allocation.load(std::memory_order_acquire),
          .offset = slot.offset.load(std::memory_order_acquire),
          .bytes = slot.bytes.load(std::memory_order_acquire),
          .isOffered = slot.isOffered.load(std::memory_order_acquire) != 0};
}

}  // namespace mooncake
