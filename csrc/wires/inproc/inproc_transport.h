#pragma once

#include <memory>

#include "engine/contract/transport.h"

namespace mooncake {

// Reaches engines of this same process. Windows are mapped as between processes. Memory of the
// program is copied straight from its place, after its owner's region table has allowed it.
class InprocTransport {
 public:
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context);
};

}  // namespace mooncake
