#pragma once

#include <algorithm>
#include <cstddef>

#include "base/result.h"

namespace mooncake {

// Input of an operation that comes while the operation runs, from its beginning on. It has one or
// several parts of the same length, which come side by side.
class InputFeed {
 public:
  virtual ~InputFeed() = default;

  // Waits until the first `bytes` of each part are there. Returns at once on a rank without input.
  virtual Status await(size_t bytes) = 0;
  // Restores all data as it was before the operation.
  virtual Status restart() = 0;
};

// Length of the pieces of each part in which such data goes. The same on all ranks. From 2 MiB on
// there are at least two pieces; many are not worth their rounds.
inline size_t fedPieceBytes(size_t partBytes, size_t parts = 1) {
  constexpr size_t kLeast = 1 << 20, kMost = 32 << 20, kPieces = 8, kLine = 64;
  const auto lines = [](size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; };
  return lines(std::clamp(lines(partBytes * parts / kPieces), kLeast, kMost) / parts);
}

}  // namespace mooncake
