#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/common/logfmt.h"
#include "kernels/ep/arguments.h"

// Dispatch and combine in plain C++, to compare the kernels with. Each function gets the inputs of
// all ranks. Only the arithmetic of one element is that of the kernels.
namespace mooncake::kernels {

// Rows of several kinds of numbers. A dispatch sends some, and experts answer with others.
class RowPool {
 public:
  static constexpr size_t kRows = 61;

  RowPool(uint64_t seed, size_t hidden);
  const std::vector<uint16_t>& row(size_t i) const { return rows_[i % kRows]; }
  std::vector<uint8_t> codes(size_t i, bool rounds) const;
  std::vector<float> scales(size_t i, bool rounds) const;
  // The numbers that are left after a way in LogFMT.
  std::vector<float> throughLogfmt(size_t i) const;
  // Bytes that the threads of a warp read of a row in that form: two threads share some bytes.
  size_t logfmtReads(size_t i) const;

 private:
  ep::LogfmtHeader logfmtHeader(size_t i, size_t begin) const;  // of a block

  std::vector<std::vector<uint16_t>> rows_;
};

struct EpShape {
  int ranks = 1;
  size_t hidden = 8, maxTokens = 1;
  std::vector<int> owners;  // by expert

  size_t perExpert() const { return size_t(ranks) * maxTokens; }
  std::vector<int32_t> expertsOf(int rank) const;
  size_t mostLocal() const;
};

// The ranks that a caller counts as active.
struct EpMask {
  uint64_t buffer = ~uint64_t(0);
  std::vector<int32_t> ranks;  // empty: the caller has none
};

// A rank's inputs of a dispatch and of its combine.
struct EpInputs {
  unsigned tokens = 0, topk = 1;
  std::vector<int64_t> chosen;  // [tokens][topk]
  std::vector<int64_t> wanted;  // the same in the combine, which may have more -1
  std::vector<float> weights;
  EpMask mask, combineMask;
  bool areWide = false;    // the choices are int64
  bool isInPlace = false;  // experts write their rows where they are published
  uint32_t handleOf = 0;   // the round with the dispatch of this combine; 0: this one
};

struct EpRound {
  uint32_t number = 1;
  RowKind kind = RowKind::kBf16;
  bool packsScales = false, usesLogfmt = false, renormalizes = false;
  std::vector<EpInputs> of;  // by rank

  // Numbers of rows in the pool.
  size_t tokenRow(int rank, size_t token) const { return number * 17 + size_t(rank) * 23 + token; }
  size_t answerRow(int32_t expert, size_t row) const {
    return number * 29 + size_t(expert) * 7 + row * 3;
  }
};

// The ranks that take part: of the operation's contributors, those that no contributor excludes.
uint64_t participantsOf(const EpRound& round, EpMask EpInputs::*mask, uint64_t contributors);

// A row of an expert.
struct Route {
  int source;
  size_t token, place;  // place: in the source's choices
};
// The rows of an expert, in their order.
std::vector<Route> routesTo(const EpShape& shape, const EpRound& round, int32_t expert,
                            uint64_t participants);

// The rank's results of a combine.
struct Combined {
  std::vector<uint16_t> channels;  // [tokens][hidden]
  std::vector<bool> missing;       // [tokens]
};
// `first`, `both`: ranks that take part in the dispatch, and in dispatch and combine.
Combined combined(const EpShape& shape, const EpRound& round, const RowPool& pool, int rank,
                  uint64_t first, uint64_t both);

}  // namespace mooncake::kernels
