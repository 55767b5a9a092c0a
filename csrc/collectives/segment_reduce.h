#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "base/result.h"
#include "collectives/reduce_cpu.h"
#include "group/operation.h"

namespace mooncake {

// One of the segments that a rank reduces, in rank order, of the buffer-th that everybody
// announced:
//   target[i] = op over r of buffer_r[offset + i]
struct Segment {
  Reduction reduction;
  const std::byte* own = nullptr;  // our own buffer's segment (not fetched, may be the target)
  size_t buffer = 0;
  uint64_t offset = 0;
  std::span<std::byte> target;
  bool isForPeers = false;  // they have just read the target's memory, and will fetch this from it
};

// The common half of large reductions. `buffers`: how many each rank announced. Works through the
// segments in chunks that stay in the cache; on message transports the fetches of the next chunks
// are under way meanwhile. `whileFetching` runs once, before anything is written to a target.
Status reduceSegments(
    Operation& op, std::span<const Segment> segments, size_t buffers,
    const std::function<Status()>& whileFetching = [] { return Status(); });

}  // namespace mooncake
