#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "device/accelerator.h"
#include "engine/memory/region_table.h"

namespace mooncake {

// Tells peers of the host how to map memory of devices that is registered here, by entry of the
// RegionTable. Lies in memory that they map, and only its owner writes it. A peer looks at the
// RegionMirror before it reads an entry, and again afterwards.
class DeviceExports {
 public:
  static constexpr size_t kMostHandleBytes = 64;

  // The handle has at most kMostHandleBytes.
  void write(size_t entry, const ExportedMemory& memory);
  ExportedMemory read(size_t entry) const;

 private:
  struct Slot {
    std::atomic<uint64_t> handleBytes, allocation, offset, bytes, isOffered;
    std::array<std::atomic<uint64_t>, kMostHandleBytes / sizeof(uint64_t)> handle;
  };
  std::array<Slot, kRegionCapacity> slots_;
};

}  // namespace mooncake
