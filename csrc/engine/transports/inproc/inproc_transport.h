#pragma once

#include <memory>

#include "engine/transports/transport.h"

namespace mooncake {

// To engines of this very process. Windows are mapped like between processes; user memory is copied
// straight from where it lies, after its owner's region table allowed it.
class InprocTransport {
 public:
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context);
};

}  // namespace mooncake
