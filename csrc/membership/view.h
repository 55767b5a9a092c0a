#pragma once

#include <cstdint>

#include "membership/rank_set.h"

namespace mooncake {

// Which ranks of the job take part. The epoch counts the changes since the first view, so that it
// says which of two views is the later one, and two different views never share it.
struct View {
  uint64_t epoch = 0;
  RankSet active;  // global ranks

  bool operator==(const View&) const = default;
};

}  // namespace mooncake
