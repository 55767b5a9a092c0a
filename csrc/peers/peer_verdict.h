#pragma once

#include <cstdint>
#include <span>

#include "kernels/group_state.h"

namespace mooncake {

// How far a rank's kernels have come when they are stopped; see kernels::HostWords.
struct PeerReport {
  uint64_t done = 0, stoppedAt = 0, ended = 0, taken = 0, hadAll = 0, skipped = 0;
  // Number of the operation that this rank has waited for longer than it wants to; 0: none.
  uint64_t late = 0;
};

// How a rank's kernels go on.
struct PeerVerdict {
  kernels::Decision decision = kernels::Decision::kGoOn;
  // See kernels::HostWords.
  uint64_t active = 0, serial = 0, partial = 0, among = 0, skipped = 0;
  bool skips = false;  // in operation `partial`, by this verdict
};

// The verdict for a rank, which all ranks find from the same reports, by rank. Only the reports of
// `active` ranks (bits) count. The last operation that any of them has ended is ended by all of
// them. If an active rank has waited too long for the next one, ranks that have not begun it are
// skipped. `banks`: see kernels::GroupState.
PeerVerdict verdictFor(int rank, uint64_t active, std::span<const PeerReport> reports,
                       unsigned banks);

}  // namespace mooncake
