#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "device/accelerator.h"
#include "device/cuda/cuda_contexts.h"

namespace mooncake {

// Pinned memory. The driver's own function to free it waits for the device, so freed blocks stay
// here, and are given out again once the streams that used them have passed. A stream of the program
// must outlive the blocks that its calls used. Thread-safe.
class CudaPinnedPool {
 public:
  explicit CudaPinnedPool(CudaContexts& contexts) : contexts_(contexts) {}

  Result<std::span<std::byte>> allocate(size_t bytes);
  void free(std::span<std::byte> memory);

  // The stream is about to use the address, which may be of no block. The stream's context is
  // current.
  void use(const void* address, DeviceStream stream);
  // The stream is about to be destroyed; its context is current. Its work so far is still awaited.
  void leave(DeviceStream stream);

 private:
  struct Recorded {
    int device = 0;
    CUevent event = nullptr;
  };
  struct Block {
    size_t capacity = 0;
    bool isFreed = false;
    bool isRetired = false;  // never given out again: a graph may use it at any time, or an error
                             // hides when its streams have passed
    std::vector<DeviceStream> users;  // without an event so far
    std::vector<Recorded> events;
  };
  using Blocks = std::map<std::byte*, Block>;

  void reclaim() REQUIRES(mutex_);
  // Returns whether no stream uses the block any more.
  Result<bool> settle(Block& block) REQUIRES(mutex_);
  // Records an event behind the stream's work. Returns false if it cannot be recorded now, as the
  // stream captures. Its context is current.
  Result<bool> record(Block& block, DeviceStream stream) REQUIRES(mutex_);
  Result<bool> hasPassed(const Recorded& recorded) REQUIRES(mutex_);

  CudaContexts& contexts_;
  Mutex mutex_;
  Blocks blocks_ GUARDED_BY(mutex_);                                // all that were ever allocated
  std::vector<std::byte*> freed_ GUARDED_BY(mutex_);                // streams may still use them
  std::multimap<size_t, std::byte*> available_ GUARDED_BY(mutex_);  // by capacity
};

}  // namespace mooncake
