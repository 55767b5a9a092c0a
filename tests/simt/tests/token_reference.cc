#include "token_reference.h"

#include <algorithm>
#include <cmath>

#include "kernels/common/bf16.h"

namespace mooncake::kernels {
namespace {
bool contains(uint64_t ranks, int rank) { return ranks >> rank & 1; }
}  // namespace

unsigned char fieldByte(size_t round, int rank, size_t token, size_t field, size_t at) {
  const uint64_t place = (((round * 32 + uint64_t(rank)) * 64 + token) * 4 + field) * 4096 + at;
  return static_cast<unsigned char>((place + 1) * 0x9e3779b97f4a7c15 >> 53);
}

float answerWeight(size_t round, int rank, size_t row, size_t weight) {
  return (float((round * 41 + size_t(rank) * 13 + row * 7 + weight * 3) % 101) - 37) / 7;
}

size_t answerRow(size_t round, int rank, size_t row) {
  return round * 31 + size_t(rank) * 17 + row;
}

size_t biasRow(size_t round, int rank, size_t token, size_t bias) {
  return round * 13 + size_t(rank) * 5 + token + bias * 37;
}

uint64_t participantsOf(const TokenRound& round, uint64_t contributors) {
  uint64_t left = contributors;
  for (size_t rank = 0; rank < round.masks.size(); ++rank) {
    if (!contains(contributors, int(rank))) continue;
    const TokenMask& given = round.masks[rank];
    left &= given.mask.buffer & given.among;
    for (size_t peer = 0; peer < given.mask.ranks.size(); ++peer)
      if (!given.mask.ranks[peer]) left &= ~(uint64_t(1) << peer);
  }
  return left;
}

std::vector<TokenRow> rowsOf(const TokenRound& dispatch, int rank, uint64_t participants) {
  std::vector<TokenRow> rows;
  for (int source = 0; source < int(dispatch.of.size()); ++source) {
    if (!contains(participants, rank) || !contains(participants, source)) continue;
    const std::vector<int32_t>& ranks = dispatch.of[size_t(source)].ranks;
    for (size_t i = 0; i < ranks.size(); ++i)
      if (ranks[i] == rank) rows.push_back({source, i / dispatch.width});
  }
  return rows;
}

TokenSums sumsOf(const TokenPlan& plan, const TokenRound& round, const RowPool& pool, int rank,
                 uint64_t first, uint64_t both) {
  const TokenRound& dispatch = plan.dispatchOf(round);
  const TokenInputs& inputs = dispatch.of[size_t(rank)];
  std::vector<std::vector<TokenRow>> rows;
  for (int owner = 0; owner < plan.ranks; ++owner) rows.push_back(rowsOf(dispatch, owner, first));
  TokenSums result;
  for (size_t token = 0; token < inputs.tokens; ++token) {
    std::vector<float> sums(plan.hidden), weights(round.weightCount);
    const auto add = [&](size_t row) {
      for (size_t i = 0; i < sums.size(); ++i)
        sums[i] = std::fmaf(ep::bf16ToFloat(pool.row(row)[i]), 1, sums[i]);
    };
    for (size_t bias = 0; bias < round.biasCount; ++bias)
      add(biasRow(round.number, rank, token, bias));
    bool isMissing = false;
    for (size_t i = token * dispatch.width; i < (token + 1) * dispatch.width; ++i) {
      const int owner = inputs.ranks[i];
      if (owner == kNone) continue;
      if (!contains(both, rank) || !contains(both, owner)) {
        isMissing = true;
        continue;
      }
      const std::vector<TokenRow>& theirs = rows[size_t(owner)];
      const auto row = size_t(std::ranges::find(theirs, TokenRow{rank, token}) - theirs.begin());
      add(answerRow(round.number, owner, row));
      for (size_t k = 0; k < weights.size(); ++k)
        weights[k] += answerWeight(round.number, owner, row, k);
    }
    for (const float sum : sums) result.channels.push_back(ep::floatToBf16(sum));
    result.weights.insert(result.weights.end(), weights.begin(), weights.end());
    result.missing.push_back(isMissing);
  }
  return result;
}

}  // namespace mooncake::kernels
