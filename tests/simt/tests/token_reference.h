#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "token_plan.h"

// Dispatch and combine of the normal mode in plain C++, to compare the kernels with. Each function
// gets the inputs of all ranks.
namespace mooncake::kernels {

// Contents of tensors. Those of two operations, ranks, tokens or rows differ.
unsigned char fieldByte(size_t round, int rank, size_t token, size_t field, size_t at);
float answerWeight(size_t round, int rank, size_t row, size_t weight);
// Numbers of rows in a RowPool.
size_t answerRow(size_t round, int rank, size_t row);
size_t biasRow(size_t round, int rank, size_t token, size_t bias);

// The ranks that take part: of the operation's contributors, those that no contributor excludes.
uint64_t participantsOf(const TokenRound& round, uint64_t contributors);

struct TokenRow {
  int source;
  size_t token;
  bool operator==(const TokenRow&) const = default;
};
// The rows of a rank after a dispatch, in their order.
std::vector<TokenRow> rowsOf(const TokenRound& dispatch, int rank, uint64_t participants);

// The rank's results of a combine.
struct TokenSums {
  std::vector<uint16_t> channels;  // [tokens][hidden]
  std::vector<float> weights;      // [tokens][weightCount]
  std::vector<bool> missing;       // [tokens]
};
// `first`, `both`: ranks that take part in the dispatch, and in dispatch and combine.
TokenSums sumsOf(const TokenPlan& plan, const TokenRound& round, const RowPool& pool, int rank,
                 uint64_t first, uint64_t both);

}  // namespace mooncake::kernels
