#pragma once

#include <algorithm>
#include <cstddef>

#include "base/result.h"

namespace mooncake {

// Data of a reduction in place that comes while the reduction runs, from its beginning on.
class InputFeed {
 public:
  virtual ~InputFeed() = default;

  // Waits until the first `bytes` are there.
  virtual Status await(size_t bytes) = 0;
  // Restores all data as it was before the reduction.
  virtual Status restart() = 0;
};

// Length of the pieces in which such data is reduced. The same on all ranks. From 2 MiB on there
// are at least two pieces; many are not worth their rounds.
inline size_t fedPieceBytes(size_t bytes) {
  constexpr size_t kLeast = 1 << 20, kMost = 32 << 20, kPieces = 8, kLine = 64;
  return std::clamp((bytes / kPieces + kLine - 1) / kLine * kLine, kLeast, kMost);
}

}  // namespace mooncake
