#pragma once

#include <cstdint>

#include "membership/rank_set.h"

namespace mooncake {

// The ranks of the job that take part. The epoch counts the changes since the first view, so it
// orders views, and no two different views share it.
struct View {
  uint64_t epoch = 0;
  JobRanks active;  // global ranks

  bool operator==(const View&) const = default;
};

}  // namespace mooncake
