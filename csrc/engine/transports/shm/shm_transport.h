#pragma once

#include <memory>

#include "engine/transports/transport.h"

namespace mooncake {

// Shared memory with other processes of the host: windows are mapped into each other, and user
// memory is read with process_vm_readv where the kernel allows it (MOONCAKE_CMA=0 turns that off),
// else sent over the socket.
class ShmTransport {
 public:
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context);
};

}  // namespace mooncake
