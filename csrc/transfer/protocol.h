#pragma once

#include <string>

#include "base/result.h"
#include "engine/env.h"
#include "transfer/transfer_env.h"

namespace mooncake::transfer {

// Selects the wires of a protocol, stores them in `env`, and returns the name of the protocol used.
// - `tcp`: TCP and the wires within a host, unless MOONCAKE_TRANSPORTS or MC_FORCE_TCP choose.
// - `shm`: the wires within a host only.
// - `efa`, `rdma`: network cards of that kind, and the wires within a host.
// - `fabric`: the cards that the MOONCAKE_FABRIC_ variables select, and the wires within a host.
// kUnsupported: the protocol is not available; the message says why and lists the alternatives.
// With settings.allowsFallback tcp is used instead, and that is logged.
Result<std::string> selectProtocol(EngineEnv& env, const TransferEnv& settings,
                                   const std::string& protocol, const std::string& logName);

// Whether this protocol moves data over network cards.
bool usesCards(const std::string& protocol);

}  // namespace mooncake::transfer
