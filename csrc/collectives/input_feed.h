#pragma once

#include <algorithm>
#include <cstddef>

#include "base/result.h"

namespace mooncake {

// Input of an operation that comes while the operation runs, from its beginning on. It has one or
// several parts, which come side by side. Only parts of all_to_all may differ in length.
class InputFeed {
 public:
  virtual ~InputFeed() = default;

  // Waits until the first `bytes` of each part are there, or all of a shorter one. Returns at once
  // on a rank without input.
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

// The same for parts of several lengths. Each rank chooses for its own input, and the longest pieces
// of all count.
constexpr size_t kMostSplitPieces = 8;
inline size_t splitPieceBytes(size_t longestPart, size_t pieces) {
  constexpr size_t kLine = 64;
  return (longestPart / pieces / kLine + 1) * kLine;
}
inline size_t splitPieceBytesOf(size_t longestPart, size_t allParts) {
  return splitPieceBytes(longestPart, std::clamp(allParts >> 20, size_t(1), kMostSplitPieces));
}

}  // namespace mooncake
