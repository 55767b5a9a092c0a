#include "token_program.h"

#include <algorithm>
#include <cstring>
#include <gtest/gtest.h>
#include <string>

#include "kernels/ep/combine_tokens.cuh"
#include "kernels/ep/dispatch_tokens.cuh"
#include "token_reference.h"

namespace mooncake::kernels {
namespace {

constexpr unsigned char kUntouched = 0xcd;

template <typename T>
void assign(std::vector<T>& tensor, size_t count) {
  tensor.resize(count);
  if (count) std::memset(tensor.data(), kUntouched, count * sizeof(T));
}

template <typename T>
void own(simt::World& world, int rank, const std::vector<T>& tensor) {
  world.own(rank, tensor.data(), tensor.size() * sizeof(T));
}

// Passes the call's exchange, which the group completes, to the kernel.
template <typename Arguments>
VirtualGroup::Kernel kernelOf(void (*kernel)(const Arguments&), const Arguments& arguments) {
  return [kernel, arguments](const Exchange& exchange) {
    Arguments made = arguments;
    made.call.exchange = exchange;
    kernel(made);
  };
}

}  // namespace

TokenProgram::TokenProgram(simt::World& world, VirtualGroup& group, const TokenPlan& plan)
    : group_(group),
      plan_(plan),
      pool_(plan.hidden * 7 + plan.rounds.size(), plan.hidden),
      of_(size_t(plan.ranks)) {
  for (int rank = 0; rank < plan.ranks; ++rank) {
    for (const TokenRound& round : plan.rounds) {
      of_[size_t(rank)].emplace_back().mask = round.masks[size_t(rank)];
      if (round.verb == TokenVerb::kCombine) {
        makeCombine(world, round, rank);
        callCombine(round, rank);
      } else {
        makeDispatch(world, round, rank);
        callDispatch(round, rank);
      }
    }
  }
}

void TokenProgram::makeDispatch(simt::World& world, const TokenRound& round, int rank) {
  Tensors& mine = tensors(round.number, rank);
  const TokenInputs& inputs = plan_.dispatchOf(round).of[size_t(rank)];
  const size_t capacity = round.capacity[size_t(rank)], ranks = size_t(plan_.ranks);
  mine.dispatched = {};
  mine.counts.assign(ranks, 0);
  for (const int32_t to : inputs.ranks) {
    // The place of none is any.
    mine.choices.push_back({to, to == kNone ? uint32_t(mine.choices.size() % 3) : 0});
    if (to != kNone) mine.choices.back().index = uint32_t(mine.counts[size_t(to)]++);
  }
  for (size_t field = 0; field < round.fields.size(); ++field) {
    const size_t bytes = round.fields[field];
    assign(mine.from.emplace_back(), shiftOf(field) + inputs.tokens * bytes);
    assign(mine.to.emplace_back(), shiftOf(field) + capacity * bytes);
    for (size_t token = 0; token < inputs.tokens; ++token)
      for (size_t i = 0; i < bytes; ++i)
        mine.from[field][shiftOf(field) + token * bytes + i] =
            fieldByte(round.number, rank, token, field, i);
    own(world, rank, mine.from[field]);
    own(world, rank, mine.to[field]);
  }
  assign(mine.sources, capacity);
  assign(mine.ends, ranks);
  assign(mine.table, ranks * (ranks + 1));
}

void TokenProgram::makeCombine(simt::World& world, const TokenRound& round, int rank) {
  Tensors& mine = tensors(round.number, rank);
  const TokenRound& dispatch = plan_.dispatchOf(round);
  const size_t tokens = dispatch.of[size_t(rank)].tokens, hidden = plan_.hidden;
  const size_t capacity = dispatch.capacity[size_t(rank)], shift = plan_.shift;
  assign(mine.x, shift + capacity * hidden);
  for (size_t row = 0; row < capacity; ++row) {
    std::ranges::copy(pool_.row(answerRow(round.number, rank, row)),
                      mine.x.data() + shift + row * hidden);
    for (size_t weight = 0; weight < round.weightCount; ++weight)
      mine.weights.push_back(answerWeight(round.number, rank, row, weight));
  }
  for (size_t bias = 0; bias < round.biasCount; ++bias) {
    assign(mine.biases[bias], shift + tokens * hidden);
    for (size_t token = 0; token < tokens; ++token)
      std::ranges::copy(pool_.row(biasRow(round.number, rank, token, bias)),
                        mine.biases[bias].data() + shift + token * hidden);
  }
  assign(mine.sums, shift + tokens * hidden);
  assign(mine.weightSums, tokens * round.weightCount);
  assign(mine.missing, tokens);
  own(world, rank, mine.x);
  own(world, rank, mine.sums);
}

// The tokens are those of the round's handle.
TokenCall TokenProgram::callOf(const TokenRound& round, int rank, size_t rowBytes) {
  const TokenRound& dispatch = plan_.dispatchOf(round);
  TokenMask& mask = tensors(round.number, rank).mask;
  TokenCall call{};
  call.exchange.call = 300 + uint32_t(round.verb);
  call.exchange.root = -1;
  call.exchange.pieces = round.pieces;
  call.exchange.readers = round.verb == TokenVerb::kCombine ? Readers::kOwnPart : Readers::kAll;
  call.mask = {&mask.mask.buffer, mask.mask.ranks.empty() ? nullptr : mask.mask.ranks.data()};
  call.among = mask.among;
  call.step = round.step;
  call.rowBytes = rowBytes;
  call.tokens = dispatch.of[size_t(rank)].tokens;
  call.width = dispatch.width;
  call.choices = tensors(handleOf(round, rank), rank).choices.data();
  return call;
}

void TokenProgram::callDispatch(const TokenRound& round, int rank) {
  Tensors& mine = tensors(round.number, rank);
  Tensors& handle = tensors(handleOf(round, rank), rank);
  DispatchTokens arguments{};
  arguments.call = callOf(round, rank, tokenBytes(round));
  for (size_t field = 0; field < round.fields.size(); ++field) {
    arguments.fields[field] = {mine.from[field].data() + shiftOf(field),
                               mine.to[field].data() + shiftOf(field), round.fields[field]};
  }
  arguments.fieldCount = unsigned(round.fields.size());
  arguments.counts = handle.counts.data();
  arguments.capacity = round.capacity[size_t(rank)];
  if (round.verb == TokenVerb::kAgain) {
    arguments.earlier = &handle.dispatched;
    arguments.earlierEnds = handle.ends.data();
  } else {
    arguments.sources = mine.sources.data();
    arguments.ends = mine.ends.data();
    arguments.table = mine.table.data();
    arguments.dispatched = &mine.dispatched;
  }
  group_.call(rank, "dispatch " + std::to_string(round.number), arguments.call.exchange,
              kernelOf(dispatchTokens, arguments));
}

void TokenProgram::callCombine(const TokenRound& round, int rank) {
  Tensors& mine = tensors(round.number, rank);
  Tensors& handle = tensors(handleOf(round, rank), rank);
  const auto bytesOf = [this](std::vector<uint16_t>& tensor) {
    return reinterpret_cast<unsigned char*>(tensor.data() + plan_.shift);
  };
  CombineTokens arguments{};
  arguments.call = callOf(round, rank, answerRowBytes(plan_.hidden, round.weightCount));
  arguments.hidden = plan_.hidden;
  arguments.weightCount = round.weightCount;
  arguments.x = bytesOf(mine.x);
  arguments.weights = mine.weights.data();
  arguments.capacity = plan_.dispatchOf(round).capacity[size_t(rank)];
  arguments.sources = handle.sources.data();
  arguments.ends = handle.ends.data();
  arguments.dispatched = &handle.dispatched;
  for (size_t bias = 0; bias < round.biasCount; ++bias)
    arguments.biases[bias] = bytesOf(mine.biases[bias]);
  arguments.biasCount = round.biasCount;
  arguments.sums = bytesOf(mine.sums);
  arguments.weightSums = mine.weightSums.data();
  arguments.missing = reinterpret_cast<bool*>(mine.missing.data());
  group_.call(rank, "combine " + std::to_string(round.number), arguments.call.exchange,
              kernelOf(combineTokens, arguments));
}

uint64_t TokenProgram::ofDispatch(const TokenRound& round, int rank) const {
  const TokenRound& dispatch = plan_.dispatchOf(round);
  return participantsOf(dispatch, group_.sources(rank, numberOf(dispatch)));
}

// One set of ranks has given all pieces. An operation of earlier rows has those of their dispatch.
uint64_t TokenProgram::ofRound(const TokenRound& round, int rank) const {
  return ofDispatch(round, rank) & participantsOf(round, group_.sources(rank, numberOf(round)));
}

void TokenProgram::check() {
  const uint64_t operations = plan_.rounds.size();
  for (int rank = 0; rank < plan_.ranks; ++rank) {
    if (group_.isKilled(rank)) continue;
    SCOPED_TRACE("rank " + std::to_string(rank));
    if (!group_.isEvicted(rank)) {
      ASSERT_EQ(group_.state(rank).failed, 0u);
      ASSERT_EQ(group_.state(rank).done, group_.ended() + operations);
      ASSERT_EQ(group_.state(rank).entered, 0u);
    }
    for (const TokenRound& round : plan_.rounds) {
      SCOPED_TRACE("round " + std::to_string(round.number));
      if (!group_.mustHaveEnded(rank, numberOf(round))) continue;
      ASSERT_EQ(group_.told(rank, numberOf(round)), group_.sources(rank, numberOf(round)));
      checkMask(round, rank);
      if (round.verb == TokenVerb::kCombine) {
        checkCombine(round, rank);
      } else {
        checkRows(round, rank);
      }
      if (round.verb == TokenVerb::kDispatch) checkFacts(round, rank);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

// Ranks that take no part are no longer active for the caller.
void TokenProgram::checkMask(const TokenRound& round, int rank) {
  const uint64_t participants = ofRound(round, rank);
  const std::vector<int32_t>& before = round.masks[size_t(rank)].mask.ranks;
  const std::vector<int32_t>& after = tensors(round.number, rank).mask.mask.ranks;
  for (size_t peer = 0; peer < before.size(); ++peer)
    ASSERT_EQ(after[peer], has(participants, int(peer)) ? before[peer] : 0);
}

// Rows have the places of the handle's dispatch. Those that do not come, and those behind the last
// one, are zeros.
void TokenProgram::checkRows(const TokenRound& round, int rank) {
  const uint64_t participants = ofRound(round, rank);
  const Tensors& mine = tensors(round.number, rank);
  const std::vector<TokenRow> rows = rowsOf(plan_.dispatchOf(round), rank, ofDispatch(round, rank));
  for (size_t place = 0; place < round.capacity[size_t(rank)]; ++place) {
    SCOPED_TRACE("place " + std::to_string(place));
    const bool isRow = place < rows.size();
    const bool hasCome = isRow && has(participants, rank) && has(participants, rows[place].source);
    gone_ += isRow && !hasCome;
    for (size_t field = 0; field < round.fields.size(); ++field) {
      const size_t bytes = round.fields[field];
      std::vector<unsigned char> due(bytes);
      for (size_t i = 0; hasCome && i < bytes; ++i)
        due[i] = fieldByte(round.number, rows[place].source, rows[place].token, field, i);
      const unsigned char* const made = mine.to[field].data() + shiftOf(field) + place * bytes;
      ASSERT_EQ(std::memcmp(made, due.data(), bytes), 0) << "field " << field;
    }
    if (round.verb == TokenVerb::kDispatch)
      ASSERT_EQ(size_t(mine.sources[place]), isRow ? rows[place].token : 0);
  }
}

void TokenProgram::checkFacts(const TokenRound& round, int rank) {
  const uint64_t participants = ofRound(round, rank);
  const Tensors& mine = tensors(round.number, rank);
  const int ranks = plan_.ranks;
  ASSERT_EQ(mine.dispatched.number, numberOf(round));
  ASSERT_EQ(mine.dispatched.participants, participants);
  const std::vector<TokenRow> rows = rowsOf(round, rank, participants);
  for (int peer = 0; peer < ranks; ++peer) {
    const auto end = std::ranges::count_if(rows, [&](auto& row) { return row.source <= peer; });
    ASSERT_EQ(mine.ends[size_t(peer)], end) << "of rank " << peer;
    const bool isIn = has(participants, rank) && has(participants, peer);
    const int32_t* const row = mine.table.data() + peer * (ranks + 1);
    for (int to = 0; to < ranks; ++to)
      ASSERT_EQ(size_t(row[to]), isIn ? round.rowsFor(peer, to) : 0) << peer << " to " << to;
    ASSERT_EQ(unsigned(row[ranks]), isIn ? round.of[size_t(peer)].tokens : 0) << "of " << peer;
  }
}

void TokenProgram::checkCombine(const TokenRound& round, int rank) {
  const Tensors& mine = tensors(round.number, rank);
  const TokenSums due =
      sumsOf(plan_, round, pool_, rank, ofDispatch(round, rank), ofRound(round, rank));
  for (size_t token = 0; token < due.missing.size(); ++token) {
    SCOPED_TRACE("token " + std::to_string(token));
    ASSERT_EQ(mine.missing[token], due.missing[token] ? 1 : 0);
    missing_ += due.missing[token];
    const size_t begin = token * plan_.hidden;
    for (size_t i = begin; i < begin + plan_.hidden; ++i)
      ASSERT_EQ(mine.sums[plan_.shift + i], due.channels[i]) << "channel " << i - begin;
  }
  ASSERT_EQ(mine.weightSums, due.weights);
}

}  // namespace mooncake::kernels
