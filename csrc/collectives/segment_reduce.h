#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "base/result.h"
#include "collectives/reduce_cpu.h"
#include "group/operation.h"

namespace mooncake {

// A segment that a rank reduces, in rank order, from buffer number `buffer` of every rank:
//   target[i] = op over r of buffer_r[offset + i]
struct Segment {
  Reduction reduction;
  const std::byte* own = nullptr;  // our own buffer's segment (not fetched, may be the target)
  size_t buffer = 0;
  uint64_t offset = 0;
  std::span<std::byte> target;
  bool isForPeers = false;  // peers have just read the target, and will read the result there
};

// The common half of large reductions. `buffers` is the number that each rank announced. Works
// through the segments in chunks that stay in the cache; on message transports the next chunks are
// fetched meanwhile. `whileFetching` runs once, before the first write to a target.
Status reduceSegments(
    Operation& op, std::span<const Segment> segments, size_t buffers,
    const std::function<Status()>& whileFetching = [] { return Status(); });

}  // namespace mooncake
