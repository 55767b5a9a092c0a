#include "token_plan.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace mooncake::kernels {

size_t tokenBytes(const TokenRound& round) {
  size_t bytes = 0;
  for (const size_t field : round.fields) bytes += toUnit(field);
  return bytes;
}

size_t TokenRound::mostTokens() const {
  size_t most = 0;
  for (const TokenInputs& inputs : of) most = std::max<size_t>(most, inputs.tokens);
  return most;
}

size_t TokenRound::rowsFor(int source, int rank, size_t begin, size_t end) const {
  const TokenInputs& inputs = of[size_t(source)];
  begin = std::min<size_t>(begin, inputs.tokens);
  end = std::min<size_t>(end, inputs.tokens);
  return size_t(std::count(inputs.ranks.begin() + ptrdiff_t(begin * width),
                           inputs.ranks.begin() + ptrdiff_t(end * width), rank));
}

TokenPlan::TokenPlan(uint64_t seed, int ranks)
    : random(seed * 257 + uint64_t(ranks)), ranks(ranks) {
  blocks = 1 + draw(3);
  threads = 32 * (1 + draw(4));
  const size_t drawn[] = {8 * (1 + draw(12)), 1 + draw(60), 257 + 2 * draw(200), 8 + draw(300)};
  hidden = drawn[draw(std::size(drawn))];
  shift = draw(2);
  const size_t count = 2 + draw(4);
  std::vector<size_t> handles;
  while (rounds.size() < count) {
    TokenRound round{.verb = TokenVerb::kDispatch, .number = rounds.size()};
    if (!handles.empty() && !drawOneIn(4))
      round.verb = drawOneIn(3) ? TokenVerb::kAgain : TokenVerb::kCombine;
    if (round.verb == TokenVerb::kDispatch) {
      round.handle = round.number;
      handles.push_back(round.handle);
      drawDispatch(round);
    } else {
      round.handle = drawOneIn(3) ? handles[draw(unsigned(handles.size()))] : handles.back();
    }
    if (round.verb == TokenVerb::kAgain) {
      drawFields(round);
      round.capacity = rounds[round.handle].capacity;
      if (drawOneIn(4)) round.capacity[draw(unsigned(ranks))] += 1 + draw(3);
    }
    if (round.verb == TokenVerb::kCombine) {
      round.weightCount = draw(2) ? draw(10) : 0;
      round.biasCount = draw(kMostBiases + 1);
    }
    const bool isNew = round.handle == round.number;
    drawPieces(round, isNew ? round.mostTokens() : rounds[round.handle].mostTokens());
    for (int rank = 0; rank < ranks; ++rank) round.masks.push_back(drawMask());
    rounds.push_back(std::move(round));
  }
}

void TokenPlan::drawDispatch(TokenRound& round) {
  constexpr size_t kMostBytes = 12'000;  // that all ranks receive, with those that come back
  const auto group = unsigned(ranks);
  drawFields(round);
  round.width = 1 + draw(drawOneIn(4) ? kMostOwners : group + 1);
  const size_t row = tokenBytes(round) + 2 * hidden;
  const size_t each = row * std::min(round.width, group) * group;
  const auto most = unsigned(std::clamp<size_t>(kMostBytes / each, 2, 24));
  for (int rank = 0; rank < ranks; ++rank) round.of.push_back(drawTokens(most, round.width));
  for (int rank = 0; rank < ranks; ++rank) {
    size_t rows = 0;
    for (int source = 0; source < ranks; ++source) rows += round.rowsFor(source, rank);
    round.capacity.push_back(rows + (draw(2) ? 0 : draw(6)));
  }
}

// A token's ranks are in any order, and have any place among those that are none.
TokenInputs TokenPlan::drawTokens(unsigned most, unsigned width) {
  enum class Kind { kAny, kAll, kOne, kNone, kCount };
  const Kind kind = drawOneIn(2) ? Kind::kAny : Kind(draw(unsigned(Kind::kCount)));
  const auto group = unsigned(ranks);
  const int32_t one = int32_t(draw(group));
  TokenInputs inputs;
  inputs.tokens = drawOneIn(4) ? (draw(2) ? most : 0) : draw(most + 1);
  std::vector<int32_t> order(std::max(width, group), kNone);
  for (unsigned token = 0; token < inputs.tokens; ++token) {
    for (unsigned i = 0; i < order.size(); ++i) order[i] = i < group ? int32_t(i) : kNone;
    std::shuffle(order.begin(), order.end(), random);
    for (unsigned i = 0; i < width; ++i) {
      const bool isLeftOut = kind == Kind::kNone || (kind == Kind::kOne && order[i] != one) ||
                             (kind == Kind::kAny && drawOneIn(4));
      inputs.ranks.push_back(isLeftOut ? kNone : order[i]);
    }
  }
  return inputs;
}

void TokenPlan::drawFields(TokenRound& round) {
  const unsigned count = 1 + draw(kMostFields);
  for (unsigned i = 0; i < count; ++i) {
    const size_t bytes[] = {1, 2, 14, 4 * (1 + draw(16)), 16 * (1 + draw(6)), 1 + draw(90)};
    round.fields.push_back(bytes[draw(std::size(bytes))]);
  }
  if (drawOneIn(8)) round.fields[draw(count)] = 2040 + draw(40);
}

// With several pieces, some ranks may have tokens in the first one only, or all ranks.
void TokenPlan::drawPieces(TokenRound& round, size_t mostTokens) {
  round.pieces = 1 + draw(4);
  round.step = std::max<size_t>((mostTokens + round.pieces - 1) / round.pieces, 1);
  if (drawOneIn(3)) round.step += draw(4);
  if (round.pieces == 1 && draw(2)) round.step = SIZE_MAX;
}

TokenMask TokenPlan::drawMask() {
  TokenMask drawn;
  const auto group = unsigned(ranks);
  if (drawOneIn(12 * group)) drawn.mask.buffer &= ~(uint64_t(1) << draw(group));
  if (drawOneIn(12 * group)) drawn.among &= ~(uint64_t(1) << draw(group));
  if (draw(2)) return drawn;
  drawn.mask.ranks.assign(group, draw(2) ? 1 : -7);
  if (drawOneIn(8 * group)) drawn.mask.ranks[draw(group)] = 0;
  return drawn;
}

size_t TokenPlan::bankBytes(const TokenRound& round, bool ofInbox) const {
  const TokenRound& dispatch = dispatchOf(round);
  const size_t rowBytes = answerRowBytes(hidden, round.weightCount);
  size_t most = 0;
  for (unsigned piece = 0; piece < round.pieces; ++piece) {
    const size_t begin = piece * round.step;
    const size_t end = round.step == SIZE_MAX ? SIZE_MAX : begin + round.step;
    for (int rank = 0; rank < ranks; ++rank) {
      const size_t all = dispatch.of[size_t(rank)].tokens;
      const size_t tokens = std::min<size_t>(end, all) - std::min<size_t>(begin, all);
      size_t rows = 0;
      for (int source = 0; source < ranks; ++source) {
        const size_t of = dispatch.rowsFor(source, rank, begin, end);
        rows = ofInbox ? std::max(rows, of) : rows + of;
      }
      most = std::max(most, round.verb == TokenVerb::kCombine
                                ? answerRowsAt() + rows * rowBytes
                                : tokenRowsAt(tokens, dispatch.width) + tokens * tokenBytes(round));
    }
  }
  return most;
}

size_t TokenPlan::bankBytes(bool ofInbox) const {
  size_t most = 0;
  for (const TokenRound& round : rounds) most = std::max(most, bankBytes(round, ofInbox));
  return toLine(most);
}

}  // namespace mooncake::kernels
