#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

#include "device/memory_owner.h"

namespace mooncake::transfer {

// Memory of this process.
struct LocalMemory {
  std::byte* data = nullptr;
  MemoryOwner owner;  // the device that owns it
};

// Copies memory of this process, of the host and of devices. Any thread.
class LocalCopier {
 public:
  LocalCopier() = default;
  ~LocalCopier();
  LocalCopier(const LocalCopier&) = delete;
  LocalCopier& operator=(const LocalCopier&) = delete;

  // Returns when the bytes are there; a device needs no stream of the program for that.
  // kInvalidArgument: memory of the host is not mapped. kUnsupported: no accelerator reaches both.
  Status copy(const LocalMemory& to, const LocalMemory& from, size_t bytes);

 private:
  // A stream that no copy uses.
  struct Stream {
    MemoryOwner owner;
    DeviceStream stream;
  };
  Result<DeviceStream> take(const MemoryOwner& owner);
  void giveBack(const MemoryOwner& owner, DeviceStream stream);

  std::mutex mutex_;  // guards idle_
  std::vector<Stream> idle_;
};

}  // namespace mooncake::transfer
