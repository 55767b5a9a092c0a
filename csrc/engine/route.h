#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/contract/transport.h"

namespace mooncake {

// The only place that chooses a wire: the first of `transports` (best first) that reaches the peer.
// `endpoint` comes from the peer's Engine::endpoint(). If no wire reaches it: kPeerLost, with the
// reason of each wire. The result must be destroyed before the transports.
Result<std::unique_ptr<Connecting>> openRoute(
    const std::vector<std::unique_ptr<Transport>>& transports, const EngineId& peer,
    ByteView endpoint, Deadline deadline);

// Returns the id of the engine that published the endpoint.
Result<EngineId> endpointOwner(ByteView endpoint);

// Returns the part of the endpoint that is meant for this transport; empty: there is none.
Bytes endpointFor(const std::string& transport, ByteView endpoint);

Bytes encodeEndpoint(const EngineId& owner,
                     const std::vector<std::unique_ptr<Transport>>& transports);

}  // namespace mooncake
