#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/deadline.h"
#include "ep/calls.h"

namespace mooncake::ep {

// Tells every rank the numbers of all ranks, ahead of a dispatch of the normal mode: no rank knows
// how many tokens other ranks have, and its layout depends on the largest number.
struct Census {
  Status inputs;                  // see calls.h
  std::vector<uint32_t> numbers;  // as many on every rank
  GroupRanks mask;                // ranks that the caller counts as active
  Deadline deadline = Deadline::at(Clock::time_point::max());
  std::optional<Clock::duration> patience;  // Operation::skipAfter()
  bool goesOn = false;                      // see Call::goesOn; not with `patience`

  // Result, by rank. Also of masked ranks, since they follow the same layout; zeros for other
  // ranks.
  std::vector<std::vector<uint32_t>> all;
};
Status count(const Memory& memory, Census& census, Ending& ending);

}  // namespace mooncake::ep
