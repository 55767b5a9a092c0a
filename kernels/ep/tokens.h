#pragma once

#include "kernels/ep/arguments.h"

// The arguments of the kernels of the normal mode, where a token's row goes once to each of its ranks,
// and the memory that a rank publishes for them. Both operations go in pieces, each of the next
// tokens of every rank. Addresses are the device's.
namespace mooncake::kernels {

constexpr unsigned kMostFields = 4;  // parts of a token's row
constexpr unsigned kMostBiases = 2;
constexpr unsigned kMostOwners = 32;  // ranks of a token: a lane has one of them

// Offsets in published memory.
//   dispatch: RowsHeader | uint32 rows for each rank, and the most that this rank takes |
//             Choice [token][width] | rows, each with its fields side by side
//   combine:  RowsHeader | uint32 place of the first row of each rank | rows, each with its weights
MOONCAKE_HOST_DEVICE constexpr size_t tokenChoicesAt() {
  return kLine + toLine((kMaxRanks + 1) * sizeof(uint32_t));
}
MOONCAKE_HOST_DEVICE constexpr size_t tokenRowsAt(size_t tokens, size_t width) {
  return tokenChoicesAt() + toLine(tokens * width * sizeof(Choice));
}
MOONCAKE_HOST_DEVICE constexpr size_t answerRowsAt() {
  return kLine + toLine(kMaxRanks * sizeof(uint32_t));
}
// Bytes of a row that comes back.
MOONCAKE_HOST_DEVICE constexpr size_t weightsOfRowAt(size_t hidden) { return toUnit(2 * hidden); }
constexpr size_t answerRowBytes(size_t hidden, size_t weights) {
  return weightsOfRowAt(hidden) + toUnit(weights * sizeof(float));
}

// The same in both kernels.
struct TokenCall {
  Exchange exchange;
  Mask mask;
  uint64_t among;         // bits of the ranks that the host counts as active
  size_t step;            // most tokens of a rank in a piece
  size_t rowBytes;        // in published memory
  unsigned tokens;        // of this rank
  unsigned width;         // most ranks of a token
  const Choice* choices;  // [token][width]: a rank, and the place among this rank's rows for it
};

// A part of a token's row.
struct Field {
  const unsigned char* from;  // [token][bytes]
  unsigned char* to;          // [row][bytes]
  size_t bytes;
};

struct DispatchTokens {
  TokenCall call;
  Field fields[kMostFields];
  unsigned fieldCount;
  const int32_t* counts;  // [rank]: this rank's rows for it
  size_t capacity;        // most rows that this rank takes. Rows behind the last one become zeros
  // An earlier dispatch: the rows go to its places. Rows of ranks that have gone since are zeros.
  // Null: none, and the results below are written.
  const Dispatched* earlier;
  const int32_t* earlierEnds;  // [rank]
  int32_t* sources;            // [row]: the token at its rank
  int32_t* ends;               // [rank]: rows of the ranks up to this one, inclusive
  int32_t* table;              // [rank][ranks + 1]: its rows for each rank, and its tokens
  Dispatched* dispatched;
};

struct CombineTokens {
  TokenCall call;
  size_t hidden;           // channels of a row
  unsigned weightCount;    // of a row
  const unsigned char* x;  // [row][hidden] of bfloat16
  const float* weights;    // [row][weightCount]
  size_t capacity;         // see DispatchTokens
  const int32_t* sources;
  const int32_t* ends;
  const Dispatched* dispatched;
  const unsigned char* biases[kMostBiases];  // [token][hidden] of bfloat16
  unsigned biasCount;
  unsigned char* sums;  // [token][hidden] of bfloat16
  float* weightSums;    // [token][weightCount]
  bool* missing;        // [token]
};

}  // namespace mooncake::kernels
