#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "base/result.h"
#include "collectives/operation.h"
#include "collectives/reduce_cpu.h"

namespace mooncake {

// The common half of large reductions: reduces one segment of everybody's announced input, in rank
// order.
//   target[i] = op over r of input_r[offset + i]
// `own` is our own input's segment (not fetched, may be the target). Works through the segment in
// chunks that stay in the cache; on message transports the fetches of the next chunks are under way
// meanwhile. `whileFetching` runs once, before anything is written to the target.
Status reduceSegment(
    Operation& op, Reduction reduction, std::span<const std::byte> own, uint64_t offset,
    std::span<std::byte> target,
    const std::function<Status()>& whileFetching = [] { return Status(); });

}  // namespace mooncake
