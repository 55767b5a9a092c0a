#pragma once

#include <span>
#include <string>

#include "base/result.h"
#include "kernels/proxy/command.h"
#include "proxy/regions.h"

namespace mooncake::proxy {

// Names the command in messages: its number (its word `valid` less one) and its ranges.
std::string describe(const kernels::ProxyCommand& command);
// kInvalidArgument: a field leaves the regions of this rank or of the peer. Reads `command` only.
Status check(const kernels::ProxyCommand& command, std::span<const LocalRegion> sources,
             const Regions& targets);

}  // namespace mooncake::proxy
