#pragma once

#include "wires/cards/fabric_transport.h"
#include "wires/nic/fabric_env.h"

namespace mooncake {

// Creates transport fabric over the cards of libfabric that the environment selects. kUnsupported
// says what is missing. There is no silent use of another wire.
Result<std::unique_ptr<Transport>> createLibfabricTransport(const TransportContext& context,
                                                            FabricTransport::Create below);
Result<std::unique_ptr<Transport>> createLibfabricTransport(const TransportContext& context,
                                                            FabricTransport::Create below,
                                                            const FabricEnv& env);

}  // namespace mooncake
