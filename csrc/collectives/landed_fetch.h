#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "group/operation.h"

namespace mooncake {

// A fetch from a rank into memory of any kind.
struct Wanted {
  int rank;
  RemoteRegion region;
  uint64_t offset = 0;
  std::span<std::byte> target;
};

// Performs all fetches. Data from ranks behind network cards goes piece by piece through the
// group's scratch memory, which the cards know. One piece is copied to its target while the next
// ones arrive. `whileFetching` runs once, when the first fetches are on their way.
Status fetchLanded(
    Operation& op, std::span<const Wanted> wanted,
    const std::function<void()>& whileFetching = [] {});

}  // namespace mooncake
