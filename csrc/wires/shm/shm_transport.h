#pragma once

#include <memory>

#include "engine/contract/transport.h"

namespace mooncake {

// Shared memory with other processes of the host. Windows are mapped into each other. Memory of the
// program is read with process_vm_readv where the kernel allows it, else sent over the socket.
// MOONCAKE_CMA=0 turns process_vm_readv off.
class ShmTransport {
 public:
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context);
};

}  // namespace mooncake
