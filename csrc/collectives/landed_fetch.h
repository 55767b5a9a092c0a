#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "group/operation.h"

namespace mooncake {

// What is fetched from a rank into memory of any kind.
struct Wanted {
  int rank;
  RemoteRegion region;
  uint64_t offset = 0;
  std::span<std::byte> target;
};

// Fetches all of them. From ranks that network cards lead to through the group's scratch memory,
// which cards know, piece by piece: one is copied to its target while the next ones come.
// `whileFetching` runs once, when the first are on their way.
Status fetchLanded(
    Operation& op, std::span<const Wanted> wanted,
    const std::function<void()>& whileFetching = [] {});

}  // namespace mooncake
