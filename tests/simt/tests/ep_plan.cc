#include "ep_plan.h"

#include <algorithm>
#include <iterator>

#include "kernels/common/logfmt.h"

namespace mooncake::kernels {
size_t sentBytes(RowKind kind, size_t hidden) { return sentRowBytes(hidden, kind); }
size_t answerBytes(bool usesLogfmt, size_t hidden) {
  return toUnit(2 * hidden) + (usesLogfmt ? ep::logfmtHeaderBytes(uint32_t(hidden)) : 0);
}

EpPlan::EpPlan(uint64_t seed, int ranks) : random(seed * 131 + uint64_t(ranks)) {
  constexpr size_t kMostChannels = 25'000;  // of all rows of a combine
  shape.ranks = ranks;
  blocks = 1 + draw(3);
  threads = 32 * (1 + draw(4));
  const size_t hidden[] = {8 * (1 + draw(20)), 9 + 2 * draw(340), 128 * (1 + draw(5)),
                           8 + draw(120), 8 + draw(693)};
  shape.hidden = hidden[draw(std::size(hidden))];
  const unsigned experts = 1 + draw(3 * unsigned(ranks) + 3), each = experts / unsigned(ranks);
  const bool areMixed = draw(2) == 0;
  for (int rank = 0; rank < ranks && !areMixed; ++rank)
    shape.owners.insert(shape.owners.end(), each + (unsigned(rank) < experts % unsigned(ranks)),
                        rank);
  for (unsigned i = 0; i < experts && areMixed; ++i)
    shape.owners.push_back(int(draw(unsigned(ranks))));
  const unsigned mostTopk = 1 + draw(drawOneIn(4) ? kMostTopk : 8);
  const size_t rows = kMostChannels / (shape.hidden * mostTopk * size_t(ranks));
  shape.maxTokens = std::clamp<size_t>(1 + draw(40), 1, std::max<size_t>(rows, 2));
  shift = draw(2);
  counts = draw(2) == 0;
  measures = draw(2) == 0;
  const uint32_t count = 1 + draw(3);
  for (uint32_t number = 1; number <= count; ++number) {
    EpRound round{.number = number, .kind = RowKind(draw(3)), .of = {}};
    round.packsScales = round.kind == RowKind::kFp8Rounded && draw(2) == 0;
    round.usesLogfmt = drawOneIn(3);
    round.renormalizes = draw(2) == 0;
    for (int rank = 0; rank < ranks; ++rank) {
      round.of.push_back(drawInputs(mostTopk));
      round.of.back().isInPlace = !round.usesLogfmt && draw(2) == 0;
    }
    rounds.push_back(std::move(round));
  }
}

EpInputs EpPlan::drawInputs(unsigned mostTopk) {
  EpInputs inputs;
  const auto most = unsigned(shape.maxTokens);
  inputs.tokens = drawOneIn(4) ? (draw(2) ? most : 0) : draw(most + 1);
  inputs.topk = drawOneIn(3) ? 1 + draw(mostTopk) : mostTopk;
  inputs.areWide = draw(2) == 0;
  drawChoices(inputs);
  inputs.wanted = inputs.chosen;
  const bool drops = drawOneIn(3);
  for (int64_t& expert : inputs.wanted) {
    if (drops && drawOneIn(4)) expert = kNone;
    inputs.weights.push_back(drawOneIn(10) ? 0 : (float(draw(2001)) - 700) / 1000);
  }
  inputs.mask = drawMask();
  inputs.combineMask = drawMask();
  return inputs;
}

EpMask EpPlan::drawMask() {
  EpMask mask;
  const auto ranks = unsigned(shape.ranks);
  if (drawOneIn(8 * ranks)) mask.buffer &= ~(uint64_t(1) << draw(ranks));
  if (draw(2)) return mask;
  mask.ranks.assign(ranks, draw(2) ? 1 : -7);
  if (drawOneIn(6 * ranks)) mask.ranks[draw(ranks)] = 0;
  return mask;
}

// Experts of a token differ, unless it names some more than once. An expert has room for as many
// rows of a rank as ranks have tokens.
void EpPlan::drawChoices(EpInputs& inputs) {
  enum class Kind { kAny, kAllHaveOne, kNoneHasOne, kRepeated, kNone, kCount };
  const Kind kind = drawOneIn(2) ? Kind::kAny : Kind(draw(unsigned(Kind::kCount)));
  const auto experts = unsigned(shape.owners.size()), special = draw(experts);
  std::vector<size_t> rows(experts);
  std::vector<int64_t> order(experts);
  for (unsigned i = 0; i < experts; ++i) order[i] = i;
  for (size_t i = 0; i < size_t(inputs.tokens) * inputs.topk; ++i) {
    const size_t place = i % inputs.topk;
    if (place == 0) std::shuffle(order.begin(), order.end(), random);
    if (place == 0 && kind == Kind::kAllHaveOne)
      std::iter_swap(order.begin(), std::ranges::find(order, int64_t(special)));
    int64_t expert = place < experts ? order[place] : kNone;
    if (kind == Kind::kRepeated) expert = draw(experts);
    if (kind == Kind::kNone || (kind == Kind::kNoneHasOne && expert == special)) expert = kNone;
    if (kind != Kind::kAllHaveOne && drawOneIn(8)) expert = kNone;
    if (expert != kNone && ++rows[size_t(expert)] > shape.maxTokens) expert = kNone;
    inputs.chosen.push_back(expert);
  }
}

size_t EpPlan::bankBytes(bool ofInbox) const {
  size_t most = 0;
  for (const EpRound& round : rounds) {
    for (const EpInputs& inputs : round.of) {
      const size_t tokens = tokensAt(shape.owners.size(), inputs.tokens, inputs.topk);
      most = std::max(most, tokens + inputs.tokens * sentBytes(round.kind, shape.hidden));
    }
    const size_t perExpert = ofInbox ? shape.maxTokens : shape.perExpert();
    const size_t rows = shape.mostLocal() * perExpert;
    most = std::max(most, answersAt(shape.mostLocal(), size_t(shape.ranks)) +
                              rows * answerBytes(round.usesLogfmt, shape.hidden));
  }
  return toLine(most);
}

void EpPlan::drawLates() {
  // Each wait for the last of them ends only if the ranks that wait skip it.
  constexpr uint64_t kTimes[] = {1'000'000, 8'000'000, 30'000'000, 90'000'000, 600'000'000};
  for (const EpRound& round : rounds)
    for (int rank = 0; rank < shape.ranks; ++rank)
      for (const unsigned operation : {0u, 1u})
        if (drawOneIn(4))
          lates.push_back({rank, round.number, operation, kTimes[draw(5)] + draw(4'000'000)});
}

uint64_t EpPlan::lateNs(int rank, uint32_t round, unsigned operation) const {
  for (const Late& late : lates)
    if (late.rank == rank && late.round == round && late.operation == operation) return late.ns;
  return 0;
}

}  // namespace mooncake::kernels
