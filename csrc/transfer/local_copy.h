#pragma once

#include <cstddef>

#include "base/result.h"
#include "device/memory_owner.h"

namespace mooncake::transfer {

// Memory of this process.
struct LocalMemory {
  std::byte* data = nullptr;
  MemoryOwner owner;  // the device that owns it
};

// Copies memory of this process, of the host and of devices. Returns when the bytes are there; a
// device needs no stream of the program for that. kInvalidArgument: memory of the host is not mapped.
// kUnsupported: no accelerator reaches both.
Status copyLocal(const LocalMemory& to, const LocalMemory& from, size_t bytes);

}  // namespace mooncake::transfer
