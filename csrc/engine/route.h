#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/transports/transport.h"

namespace mooncake {

// The only place that chooses a wire: the first of `transports` (best first) that leads to the
// peer. `endpoint` is what Engine::endpoint() made there. kPeerLost with every wire's own reason
// when none does. Goes before the transports do.
Result<std::unique_ptr<Connecting>> openRoute(
    const std::vector<std::unique_ptr<Transport>>& transports, const EngineId& peer,
    ByteView endpoint, Deadline deadline);

// The engine's id at the start of an endpoint.
Result<EngineId> endpointOwner(ByteView endpoint);

// The part of it that is meant for this transport; empty: there is none.
Bytes endpointFor(const std::string& transport, ByteView endpoint);

Bytes encodeEndpoint(const EngineId& owner,
                     const std::vector<std::unique_ptr<Transport>>& transports);

}  // namespace mooncake
