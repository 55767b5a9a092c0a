#pragma once

#include <cstdint>

#include "ep/rows.h"
#include "group/operation.h"

namespace mooncake::ep {

// Calls awaitAllBegun(). Adds to waits[rank], in microseconds, how long the rank was awaited after
// the ranks before it had begun. `waits` may be null.
inline Status awaitBegun(Operation& op, int64_t* waits) {
  if (!waits) return op.awaitAllBegun();
  auto since = Clock::now();
  return op.awaitAllBegun([&](int rank) {
    const auto now = Clock::now();
    waits[rank] += std::chrono::duration_cast<std::chrono::microseconds>(now - since).count();
    since = now;
  });
}

inline int ranksOfHost(const Operation& op) { return op.size() - int(op.unmapped()); }

// How rows are copied to send memory. Ranks that share cores, and this rank when it sends rows to
// other hosts, read them from the cache.
inline CopyHint stagingHint(const Operation& op, size_t bytes) {
  const bool isReadElsewhere = op.group().window().fullyMapped() && !op.group().isCrowded();
  return isReadElsewhere ? copyHintForPeers(bytes, ranksOfHost(op))
                         : copyHint(bytes, ranksOfHost(op));
}

}  // namespace mooncake::ep
