#pragma once

#include <string_view>

#include "wires/nic/nic.h"

namespace mooncake {

// Translates a libfabric completion error into a `NicError`. `error` is libfabric's (positive).
// `ofProvider` is the provider's own number, which says more for providers that we know.
NicError nicErrorOf(std::string_view provider, int error, int ofProvider);

}  // namespace mooncake
