#include "ep_reference.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "kernels/common/fp8.h"
#include "kernels/common/logfmt.h"

namespace mooncake::kernels {
namespace {

constexpr size_t kBlock = 128;  // channels with a scale, or with a header
static_assert(kBlock == ep::kFp8Block && kBlock == ep::kLogfmtBlock);

bool contains(uint64_t ranks, int rank) { return ranks >> rank & 1; }

// A bfloat16 with one of `count` exponents.
uint16_t number(std::mt19937_64& random, unsigned firstExponent, unsigned count) {
  const auto exponent = firstExponent + unsigned(random() % count);
  return uint16_t(random() % 2 << 15 | exponent << 7 | random() % 128);
}

void fillBlock(std::mt19937_64& random, uint16_t* block, size_t channels) {
  const auto kind = random() % 12;
  for (size_t i = 0; i < channels; ++i) {
    block[i] = kind == 0   ? uint16_t(random() % 2 << 15)  // zeros
               : kind == 1 ? number(random, 90, 74)
               : kind == 2 ? number(random, 0, 3)  // near the least number, and below it
               : kind == 3 ? number(random, 250, 5)
                           : number(random, 120, 12);
    if (kind > 3 && random() % 16 == 0) block[i] = 0;
  }
  if (kind == 4) block[random() % channels] = ep::kBf16Nan;
  if (kind == 5) block[random() % channels] = ep::kBf16Infinity;
}

ep::Fp8Scale scaleOf(const std::vector<uint16_t>& row, size_t begin, bool rounds) {
  float largest = 0;
  for (size_t i = begin; i < std::min(begin + kBlock, row.size()); ++i) {
    const float magnitude = std::fabs(ep::bf16ToFloat(row[i]));
    if (magnitude > largest) largest = magnitude;
  }
  return ep::fp8Scale(largest, rounds);
}

// Adds the weighted numbers up, in the order in which rows are added.
struct Sums {
  std::vector<float> of;
  template <typename Number>
  void add(float weight, const Number& number) {
    for (size_t i = 0; i < of.size(); ++i) of[i] = std::fmaf(number(i), weight, of[i]);
  }
};

}  // namespace

RowPool::RowPool(uint64_t seed, size_t hidden) : rows_(kRows, std::vector<uint16_t>(hidden)) {
  std::mt19937_64 random(seed);
  for (auto& row : rows_)
    for (size_t i = 0; i < hidden; i += kBlock)
      fillBlock(random, row.data() + i, std::min(kBlock, hidden - i));
}

std::vector<uint8_t> RowPool::codes(size_t i, bool rounds) const {
  std::vector<uint8_t> codes;
  ep::Fp8Scale scale{};
  for (const uint16_t channel : row(i)) {
    if (codes.size() % kBlock == 0) scale = scaleOf(row(i), codes.size(), rounds);
    codes.push_back(ep::castToE4m3(channel, scale));
  }
  return codes;
}

std::vector<float> RowPool::scales(size_t i, bool rounds) const {
  std::vector<float> scales;
  for (size_t begin = 0; begin < row(i).size(); begin += kBlock)
    scales.push_back(scaleOf(row(i), begin, rounds).scale);
  return scales;
}

// Short blocks have none: their numbers cross as they are.
ep::LogfmtHeader RowPool::logfmtHeader(size_t i, size_t begin) const {
  uint16_t largest = 0, smallest = ep::kBf16Infinity;
  if (begin + kBlock > row(i).size()) return {0, 0};
  for (size_t k = begin; k < begin + kBlock; ++k) {
    const uint16_t magnitude = row(i)[k] & 0x7fff;
    largest = std::max(largest, magnitude);
    if (magnitude) smallest = std::min(smallest, magnitude);
  }
  return ep::logfmtHeader(largest, smallest);
}

std::vector<float> RowPool::throughLogfmt(size_t i) const {
  std::vector<float> numbers;
  ep::LogfmtHeader header{};
  for (const uint16_t channel : row(i)) {
    const size_t k = numbers.size();
    if (k % kBlock == 0) header = logfmtHeader(i, k);
    numbers.push_back(ep::bf16ToFloat(channel));
    if (header.step == 0) continue;
    const uint32_t code = ep::logfmtCode(channel & 0x7fff, header);
    numbers[k] = std::copysign(ep::logfmtMagnitude(code, header), numbers[k]);
  }
  return numbers;
}

size_t RowPool::logfmtReads(size_t i) const {
  constexpr size_t kShared = 32;  // bytes of ninth bits and signs
  const size_t hidden = row(i).size();
  size_t bytes = ep::logfmtHeaderBytes(uint32_t(hidden));
  for (size_t begin = 0; begin < hidden; begin += kBlock) {
    const ep::LogfmtHeader header = logfmtHeader(i, begin);
    bytes += ep::logfmtBlockBytes(header, uint32_t(std::min(kBlock, hidden - begin)));
    if (header.step != 0) bytes += kShared;
  }
  return bytes;
}

std::vector<int32_t> EpShape::expertsOf(int rank) const {
  std::vector<int32_t> experts;
  for (size_t e = 0; e < owners.size(); ++e)
    if (owners[e] == rank) experts.push_back(int32_t(e));
  return experts;
}

size_t EpShape::mostLocal() const {
  size_t most = 0;
  for (int rank = 0; rank < ranks; ++rank) most = std::max(most, expertsOf(rank).size());
  return most;
}

uint64_t participantsOf(const EpRound& round, EpMask EpInputs::*mask, uint64_t contributors) {
  uint64_t left = contributors;
  for (size_t rank = 0; rank < round.of.size(); ++rank) {
    if (!contains(contributors, int(rank))) continue;
    const EpMask& given = round.of[rank].*mask;
    left &= given.buffer;
    for (size_t peer = 0; peer < given.ranks.size(); ++peer)
      if (!given.ranks[peer]) left &= ~(uint64_t(1) << peer);
  }
  return left;
}

std::vector<Route> routesTo(const EpShape& shape, const EpRound& round, int32_t expert,
                            uint64_t participants) {
  std::vector<Route> routes;
  if (!contains(participants, shape.owners[size_t(expert)])) return routes;
  for (int source = 0; source < shape.ranks; ++source) {
    if (!contains(participants, source)) continue;
    const EpInputs& inputs = round.of[size_t(source)];
    for (size_t i = 0; i < inputs.chosen.size(); ++i)
      if (inputs.chosen[i] == expert) routes.push_back({source, i / inputs.topk, i});
  }
  return routes;
}

Combined combined(const EpShape& shape, const EpRound& round, const RowPool& pool, int rank,
                  uint64_t first, uint64_t both) {
  const EpInputs& inputs = round.of[size_t(rank)];
  std::vector<size_t> rowOf(inputs.chosen.size());
  for (int32_t expert = 0; expert < int32_t(shape.owners.size()); ++expert) {
    const std::vector<Route> routes = routesTo(shape, round, expert, first);
    for (size_t row = 0; row < routes.size(); ++row)
      if (routes[row].source == rank) rowOf[routes[row].place] = row;
  }
  Combined result;
  for (size_t token = 0; token < inputs.tokens; ++token) {
    float wanted = 0, arrived = 0;
    bool isMissing = false;
    std::vector<size_t> places;  // of the choices that arrive
    for (size_t i = token * inputs.topk; i < (token + 1) * inputs.topk; ++i) {
      if (inputs.wanted[i] < 0) continue;
      wanted += inputs.weights[i];
      if (contains(both, rank) && contains(both, shape.owners[size_t(inputs.wanted[i])])) {
        arrived += inputs.weights[i];
        places.push_back(i);
      } else {
        isMissing = true;
      }
    }
    Sums sums{std::vector<float>(shape.hidden)};
    for (const size_t i : places) {
      float weight = inputs.weights[i];
      if (isMissing && round.renormalizes && arrived != 0) weight *= wanted / arrived;
      const size_t answer = round.answerRow(int32_t(inputs.wanted[i]), rowOf[i]);
      if (round.usesLogfmt) {
        const std::vector<float> numbers = pool.throughLogfmt(answer);
        sums.add(weight, [&](size_t k) { return numbers[k]; });
      } else {
        sums.add(weight, [&](size_t k) { return ep::bf16ToFloat(pool.row(answer)[k]); });
      }
    }
    for (const float sum : sums.of) result.channels.push_back(ep::floatToBf16(sum));
    result.missing.push_back(isMissing);
  }
  return result;
}

}  // namespace mooncake::kernels
