#pragma once

#include <string_view>

#include "engine/nic/nic.h"

namespace mooncake {

// What a completion error means to whoever asked. `error` is libfabric's (positive), `ofProvider`
// the provider's own number, which says more where we know the provider.
NicError nicErrorOf(std::string_view provider, int error, int ofProvider);

}  // namespace mooncake
