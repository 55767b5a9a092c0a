#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <span>

#include "base/mutex.h"
#include "device/accelerator.h"

namespace mooncake {

// Pinned memory for the work of one device's streams. A piece that was given back serves again once
// the stream that used it has passed, so no operation allocates or frees. Thread-safe.
class PinnedPool {
 public:
  // `idleLimit`: bytes that the pool keeps beyond pieces in use, and beyond pieces that a stream
  // still uses. It frees the ones that were used longest ago. The accelerator outlives the pool.
  PinnedPool(Accelerator& accelerator, int device, size_t idleLimit)
      : accelerator_(accelerator), device_(device), idleLimit_(idleLimit) {}
  // Frees the idle pieces. Every piece must have been given back.
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  struct Piece {
    std::span<std::byte> memory;         // at least as much as was asked for
    std::unique_ptr<DeviceEvent> event;  // behind its last use; null: never used
  };

  // Never waits. The contents are undefined. kExhausted, kSystem: of allocatePinned().
  Result<Piece> take(size_t bytes);
  // `stream`: comes after all work that touches the memory. Does not wait for it.
  void giveBack(Piece piece, DeviceStream stream);

  // Bytes that wait for their next use.
  size_t idleBytes() const;

 private:
  static size_t roundedUp(size_t bytes);
  void free(Piece& piece);

  using Idle = std::list<Piece>;  // given back last: at the back

  Accelerator& accelerator_;
  const int device_;
  const size_t idleLimit_;
  mutable Mutex mutex_;
  Idle idle_ GUARDED_BY(mutex_);
  std::multimap<size_t, Idle::iterator> bySize_ GUARDED_BY(mutex_);
  size_t idleBytes_ GUARDED_BY(mutex_) = 0;
};

}  // namespace mooncake
