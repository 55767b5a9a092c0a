#pragma once

#include <array>
#include <cstddef>

namespace mooncake {

// Random; names one engine for its whole life, and no other engine ever.
using EngineId = std::array<std::byte, 16>;

}  // namespace mooncake
