#pragma once

#include <cstdint>

#include "ep/rows.h"
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

inline int ranksOfHost(const Operation& op) { return op.size() - int(op.unmapped()); }

// How rows go to where the others read them. Ranks that share cores find them in the cache; so do
// those that send them on.
inline CopyHint stagingHint(const Operation& op, size_t bytes) {
  const bool isReadElsewhere = op.group().window().fullyMapped() && !op.group().isCrowded();
  return isReadElsewhere ? copyHintForPeers(bytes, ranksOfHost(op))
                         : copyHint(bytes, ranksOfHost(op));
}

}  // namespace mooncake::ep
