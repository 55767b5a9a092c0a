#pragma once

#include <cstddef>
#include <cstdint>

namespace mooncake::kernels {

// The argument of the kernel that copies the used rows of a tensor [blocks, rows, ...]. They stand at
// the beginning of each block.
struct CopyRowsArguments {
  unsigned char* to;
  const unsigned char* from;
  const int32_t* counts;  // the used rows of each `blocksEach` blocks; clamped to 0 ... rows
  uint32_t blocks;        // a multiple of blocksEach
  uint32_t blocksEach;
  uint32_t rows;
  size_t rowBytes;
};

// Most elements of `counts` that the kernel keeps at once.
inline constexpr unsigned kCountsAtOnce = 128;

}  // namespace mooncake::kernels
