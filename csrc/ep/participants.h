#pragma once

#include <cstdint>

#include "group/operation.h"

namespace mooncake::ep {

// awaitAllBegun(), and how long each rank was waited for when those before it had come: added to
// waits[rank], in microseconds. `waits` may be null.
inline Status awaitBegun(Operation& op, int64_t* waits) {
  if (!waits) return op.awaitAllBegun();
  auto since = Clock::now();
  return op.awaitAllBegun([&](int rank) {
    const auto now = Clock::now();
    waits[rank] += std::chrono::duration_cast<std::chrono::microseconds>(now - since).count();
    since = now;
  });
}

}  // namespace mooncake::ep
