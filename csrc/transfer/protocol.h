#pragma once

#include <string>

#include "base/env.h"
#include "base/result.h"
#include "base/transfer_env.h"

namespace mooncake::transfer {

// What a protocol's name selects: `tcp` the short ways within a process and a host, too, unless
// MOONCAKE_TRANSPORTS or MC_FORCE_TCP ask for a wire; `shm` those alone; `efa` and `rdma`
// network cards of that kind and the short ways, `fabric` the cards that the variables say. Puts it
// into env and returns the name of what is used. kUnsupported says why it cannot be had and
// what there is; with settings.allowsFallback it is tcp instead, which is logged.
Result<std::string> selectProtocol(Env& env, const TransferEnv& settings,
                                   const std::string& protocol, const std::string& logName);

// Whether a protocol of this name moves bytes over network cards.
bool usesCards(const std::string& protocol);

}  // namespace mooncake::transfer
