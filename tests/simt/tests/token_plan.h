#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "ep_reference.h"
#include "kernels/ep/tokens.h"

namespace mooncake::kernels {

// The ranks that a caller counts as active in one operation.
struct TokenMask {
  EpMask mask;
  uint64_t among = ~uint64_t(0);
};

// A rank's tokens of a dispatch.
struct TokenInputs {
  unsigned tokens = 0;
  std::vector<int32_t> ranks;  // [tokens][width]: each rank at most once for a token, or kNone
};

enum class TokenVerb : uint8_t { kDispatch, kAgain, kCombine };

// One operation of all ranks.
struct TokenRound {
  TokenVerb verb = TokenVerb::kDispatch;
  size_t number = 0;                          // from 0 on
  size_t handle = 0;                          // the round with the dispatch of these tokens
  std::pair<int, size_t> otherHandle{-1, 0};  // a rank that has another one by mistake
  unsigned pieces = 1;
  size_t step = 1;
  std::vector<TokenMask> masks;  // by rank
  // The tokens; a dispatch that goes again, and a combine, have those of their handle.
  unsigned width = 1;
  std::vector<TokenInputs> of;  // by rank
  // Dispatches.
  std::vector<size_t> fields;    // bytes of each part of a row
  std::vector<size_t> capacity;  // by rank
  // Combines.
  unsigned weightCount = 0, biasCount = 0;

  size_t mostTokens() const;
  // Rows that a rank has for another one in a piece: tokens [begin, end).
  size_t rowsFor(int source, int rank, size_t begin = 0, size_t end = SIZE_MAX) const;
};

// The draw of one seed: operations of a group, with the inputs of all ranks.
struct TokenPlan {
  TokenPlan(uint64_t seed, int ranks);

  unsigned draw(unsigned below) { return unsigned(random() % below); }
  bool drawOneIn(unsigned count) { return draw(count) == 0; }
  const TokenRound& dispatchOf(const TokenRound& round) const { return rounds[round.handle]; }
  // The published memory that an operation needs, and all of them; and an inbox.
  size_t bankBytes(const TokenRound& round, bool ofInbox = false) const;
  size_t bankBytes(bool ofInbox = false) const;

  std::mt19937_64 random;
  int ranks;
  unsigned blocks, threads;
  size_t hidden;  // channels of rows that come back
  size_t shift;   // channels by which tensors miss their alignment
  std::vector<TokenRound> rounds;

 private:
  void drawDispatch(TokenRound& round);
  TokenInputs drawTokens(unsigned most, unsigned width);
  void drawFields(TokenRound& round);
  void drawPieces(TokenRound& round, size_t mostTokens);
  TokenMask drawMask();
};

// Bytes of a row in published memory, of a dispatch.
size_t tokenBytes(const TokenRound& round);

}  // namespace mooncake::kernels
