#pragma once

#include "engine/nic/fabric_env.h"
#include "engine/transports/fabric/fabric_transport.h"

namespace mooncake {

// Transport fabric over the cards that libfabric has, as the variables choose them. kUnsupported
// says what is missing: never another wire instead.
Result<std::unique_ptr<Transport>> createLibfabricTransport(const TransportContext& context,
                                                            FabricTransport::Create below);
Result<std::unique_ptr<Transport>> createLibfabricTransport(const TransportContext& context,
                                                            FabricTransport::Create below,
                                                            const FabricEnv& env);

}  // namespace mooncake
