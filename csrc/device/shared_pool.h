#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <span>

#include "base/fd.h"
#include "base/mutex.h"
#include "base/result.h"
#include "device/accelerator.h"
#include "device/peer_memory.h"

namespace mooncake {

// A bounded piece of PeerMemory on one device, cut into pieces for users. A user has at most as much
// as is then left for the other users: so one user has half of the memory at most, and each further
// one finds some. A piece that was given back serves again once the stream that used it has passed.
// Thread-safe.
class SharedPool {
 public:
  // The accelerator outlives the pool. PeerMemory's errors.
  static Result<std::shared_ptr<SharedPool>> make(Accelerator& accelerator, int device,
                                                  size_t bytes);
  // Unmaps the memory, if no stream uses it any more. Every piece must have been given back.
  ~SharedPool();
  SharedPool(const SharedPool&) = delete;
  SharedPool& operator=(const SharedPool&) = delete;

  struct Piece {
    std::span<std::byte> memory;  // at least as much as was asked for
    uint64_t user = 0;
  };
  // Never waits. The contents are undefined. kExhausted: the user has its share, or there is no room.
  Result<Piece> take(uint64_t user, size_t bytes);
  // `stream`: comes after all work that touches the memory. Does not wait for it.
  void giveBack(const Piece& piece, DeviceStream stream);

  std::span<std::byte> memory() const { return memory_; }
  const Fd& descriptor() const { return descriptor_; }  // of the memory

 private:
  struct Leaving {
    Piece piece;
    std::unique_ptr<DeviceEvent> event;
  };

  SharedPool(Accelerator& accelerator, int device, PeerMemory::Allocation allocation);
  void takeBack() REQUIRES(mutex_);
  void release(const Piece& piece) REQUIRES(mutex_);

  Accelerator& accelerator_;
  const int device_;
  const std::span<std::byte> memory_;
  const Fd descriptor_;
  Mutex mutex_;
  std::map<size_t, size_t> free_ GUARDED_BY(mutex_);    // offset -> bytes, neighbours merged
  std::map<uint64_t, size_t> used_ GUARDED_BY(mutex_);  // bytes by user
  size_t freeBytes_ GUARDED_BY(mutex_);
  std::list<Leaving> leaving_ GUARDED_BY(mutex_);  // given back, and not passed yet
  std::list<std::unique_ptr<DeviceEvent>> events_ GUARDED_BY(mutex_);  // idle
};

}  // namespace mooncake
