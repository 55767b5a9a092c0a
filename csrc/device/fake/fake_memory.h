#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>

#include "base/fd.h"
#include "base/mutex.h"
#include "base/result.h"
#include "device/accelerator.h"
#include "device/peer_memory.h"

namespace mooncake {

// The memory of fake devices. Each device has one memfd, which other processes open by way of /proc,
// and each allocation a range and a mapping of its own. Shared memory has a memfd for each allocation,
// which is handed over. Thread-safe.
class FakeMemory {
 public:
  static constexpr int kDevices = 2;

  // kExhausted above the limit.
  Result<std::span<std::byte>> allocate(int device, size_t bytes);
  Result<std::span<std::byte>> allocatePinned(size_t bytes);
  void limit(size_t bytes);

  MemoryPlace placeOf(const void* address);
  // kInvalidArgument if the range begins in memory of ours and ends outside.
  Status checkRange(const void* address, size_t bytes);

  Result<ExportedMemory> exportMemory(const void* address);
  Result<void*> importMemory(const ExportedMemory& memory, int device);

  // PeerMemory's functions of the same names.
  Result<PeerMemory::Allocation> allocateShared(int device, size_t bytes);
  Result<std::span<std::byte>> mapShared(const Fd& descriptor, size_t bytes, int device);

  enum class Origin : uint8_t { kAllocated, kPinned, kImported, kShared };
  // Forgets the memory, and returns the object that keeps it mapped. Null: there is no such memory.
  // `address` is the one that was returned for the memory.
  std::shared_ptr<void> release(const void* address, Origin origin);

 private:
  class Mapping;
  struct Block {
    std::shared_ptr<Mapping> mapping;
    Origin origin = Origin::kAllocated;
    int device = -1;
    size_t bytes = 0;         // that were asked for
    size_t charged = 0;       // of them, bytes that count towards the limit
    uint64_t fileOffset = 0;  // in the device's memfd
    size_t offset = 0;        // of the address that was returned: imported memory begins before it
  };
  using Blocks = std::map<uintptr_t, Block>;  // by start

  // Returns the block that holds the address, or end().
  Blocks::iterator find(const void* address) REQUIRES(mutex_);
  void* add(Block block) REQUIRES(mutex_);
  Status checkLimit(size_t bytes) const REQUIRES(mutex_);

  Mutex mutex_;
  Blocks blocks_ GUARDED_BY(mutex_);
  size_t limit_ GUARDED_BY(mutex_) = SIZE_MAX;
  size_t allocated_ GUARDED_BY(mutex_) = 0;
  struct DeviceFile {
    std::shared_ptr<Fd> fd;
    uint64_t bytes = 0;  // ranges are never used again, so a stale handle leads to no other memory
  };
  std::array<DeviceFile, kDevices> files_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
