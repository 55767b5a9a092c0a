#pragma once

#include <cstddef>
#include <span>

#include "base/fd.h"
#include "base/result.h"

namespace mooncake {

// Memory of devices that processes of one host map. It stays alive while any process maps it or
// holds a descriptor of it. So the death of the process that allocated it leaves all other
// processes able to read and write. Functions may wait for a device: they are to be called ahead of
// work that waits for the caller. They return Accelerator's errors. Thread-safe.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;

  struct Allocation {
    std::span<std::byte> memory;  // mapped for the device; at least as much as was asked for
    Fd descriptor;  // of the memory, for other processes: a unix socket takes it there
  };

  // kUnsupported: the device cannot share memory in this way; the text says why.
  virtual Status checkSharing(int device) = 0;
  // The contents are undefined. kExhausted: the device has no such memory left.
  virtual Result<Allocation> allocateShared(int device, size_t bytes) = 0;
  // Maps memory of a process of this host for work of `device`, which is one of this process's own.
  // `bytes` is the size of Allocation's `memory`. The descriptor stays the caller's. kUnsupported:
  // the device does not reach the memory.
  virtual Result<std::span<std::byte>> mapShared(const Fd& descriptor, size_t bytes,
                                                 int device) = 0;
  // Takes memory of either function out of this process. No work that uses it may run.
  virtual Status unmapShared(std::span<std::byte> memory) = 0;

  // Maps memory of allocateShared() for stores of the host as well. Kernels see them in their order
  // if the host calls drainStores() (base/stores.h) after each. For kUnsupported, the text says why
  // there is no way.
  virtual Result<std::span<std::byte>> mapForHost(std::span<std::byte> memory) = 0;
  // Takes it away from the host, before unmapShared().
  virtual void unmapForHost(std::span<std::byte> mapped) = 0;

  // Whether work of `device` reaches memory of `peer`, both of them devices of this process.
  virtual Result<bool> canAccessPeer(int device, int peer) = 0;
};

}  // namespace mooncake
