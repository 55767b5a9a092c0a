#include "ep_program.h"

#include <algorithm>
#include <cstring>
#include <gtest/gtest.h>

#include "kernels/common/fp8.h"
#include "kernels/ep/combine.cuh"
#include "kernels/ep/dispatch.cuh"

namespace mooncake::kernels {
namespace {

constexpr unsigned char kUntouched = 0xcd;

template <typename T>
void assign(std::vector<T>& tensor, size_t count) {
  tensor.resize(count);
  if (count) std::memset(tensor.data(), kUntouched, count * sizeof(T));
}

}  // namespace

EpProgram::EpProgram(simt::World& world, VirtualGroup& group, const EpPlan& plan)
    : group_(group),
      plan_(plan),
      shape_(plan.shape),
      pool_(plan.shape.hidden * 7 + plan.rounds.size(), plan.shape.hidden),
      of_(size_t(shape_.ranks)) {
  std::vector<int32_t> local(size_t(shape_.ranks));
  std::vector<Expert> experts;
  for (const int owner : shape_.owners) experts.push_back({owner, local[size_t(owner)]++});
  for (int rank = 0; rank < shape_.ranks; ++rank) {
    Rank& own = of_[size_t(rank)];
    own.experts = experts;
    own.mine = shape_.expertsOf(rank);
    own.added.assign(own.mine.size(), 3 + rank);
    own.waits.assign(size_t(shape_.ranks), kWaitsBefore);
    for (const EpRound& round : plan.rounds) {
      make(world, round, rank);
      callDelay(round, rank, 0);
      callDispatch(round, rank);
      if (!plan.combines) continue;
      callExperts(round, rank);
      callDelay(round, rank, 1);
      callCombine(round, rank);
    }
  }
}

void EpProgram::make(simt::World& world, const EpRound& round, int rank) {
  Tensors& mine = of_[size_t(rank)].rounds.emplace_back();
  const EpInputs& inputs = round.of[size_t(rank)];
  const size_t local = of_[size_t(rank)].mine.size(), ranks = size_t(shape_.ranks);
  const size_t rows = local * shape_.perExpert(), hidden = shape_.hidden;
  mine.narrow[0].assign(inputs.chosen.begin(), inputs.chosen.end());
  mine.narrow[1].assign(inputs.wanted.begin(), inputs.wanted.end());
  assign(mine.x, plan_.shift + inputs.tokens * hidden);
  for (size_t token = 0; token < inputs.tokens; ++token)
    std::ranges::copy(pool_.row(round.tokenRow(rank, token)),
                      mine.x.data() + plan_.shift + token * hidden);
  assign(mine.choices, inputs.chosen.size());
  assign(mine.rows, 2 * plan_.shift + rows * hidden * (round.kind == RowKind::kBf16 ? 2 : 1));
  assign(mine.scales, rows * scalesOf(hidden));
  assign(mine.counts, local);
  assign(mine.keptCounts, local);
  assign(mine.sources, rows);
  assign(mine.ranges, local * ranks);
  assign(mine.keptRanges, local * ranks);
  mine.dispatched = {};
  mine.mask = inputs.mask;
  mine.combineMask = inputs.combineMask;
  if (!inputs.isInPlace) assign(mine.answers, plan_.shift + rows * hidden);
  assign(mine.combined, plan_.shift + inputs.tokens * hidden);
  assign(mine.missing, inputs.tokens);
  world.own(rank, mine.x.data(), mine.x.size() * 2);
  world.own(rank, mine.rows.data(), mine.rows.size());
  world.own(rank, mine.answers.data(), mine.answers.size() * 2);
  world.own(rank, mine.combined.data(), mine.combined.size() * 2);
}

ExpertCall EpProgram::callOf(int rank, uint32_t hash, size_t rowBytes) const {
  ExpertCall call{};
  call.exchange.call = hash;
  call.exchange.root = -1;
  call.exchange.pieces = 1;
  call.exchange.readers = Readers::kOwnPart;
  call.maxTokens = shape_.maxTokens;
  call.hidden = shape_.hidden;
  call.experts = unsigned(shape_.owners.size());
  call.local = unsigned(of_[size_t(rank)].mine.size());
  call.rowBytes = rowBytes;
  call.answersAt = answersAt(shape_.mostLocal(), size_t(shape_.ranks));
  return call;
}

// The number of the round's dispatch. That of its combine comes next.
uint64_t EpProgram::dispatchNumber(const EpRound& round) const {
  return group_.ended() + 1 + (round.number - 1) * (plan_.combines ? 2 : 1);
}

// Where experts write their rows.
unsigned char* EpProgram::answersOf(const EpRound& round, int rank) {
  if (!round.of[size_t(rank)].isInPlace)
    return reinterpret_cast<unsigned char*>(tensors(round, rank).answers.data() + plan_.shift);
  const GroupState& state = group_.state(rank);
  const uint64_t combine = dispatchNumber(round) + 1;
  return state.data[rank] + (combine & 1) * state.bankBytes +
         answersAt(shape_.mostLocal(), size_t(shape_.ranks));
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

void EpProgram::callDelay(const EpRound& round, int rank, unsigned operation) {
  const uint64_t ns = plan_.lateNs(rank, round.number, operation);
  if (ns == 0) return;
  group_.run(rank, "late", [ns] {
    for (const uint64_t since = now(); now() < since + ns;) relax();
  });
}

void EpProgram::callDispatch(const EpRound& round, int rank) {
  Tensors& mine = tensors(round, rank);
  Rank& own = of_[size_t(rank)];
  const EpInputs& inputs = round.of[size_t(rank)];
  const void* const chosen =
      inputs.areWide ? static_cast<const void*>(inputs.chosen.data()) : mine.narrow[0].data();
  const ExpertCall call =
      callOf(rank, 100 + uint32_t(round.kind), sentBytes(round.kind, shape_.hidden));
  const DispatchSend send{call,
                          maskOf(mine.mask),
                          {chosen, inputs.areWide, inputs.tokens, inputs.topk},
                          reinterpret_cast<const unsigned char*>(mine.x.data() + plan_.shift),
                          round.kind,
                          mine.choices.data(),
                          own.experts.data()};
  const DispatchReceive receive{call,
                                maskOf(mine.mask),
                                round.kind,
                                round.packsScales,
                                own.experts.data(),
                                own.mine.data(),
                                mine.rows.data() + 2 * plan_.shift,
                                mine.scales.data(),
                                mine.counts.data(),
                                mine.sources.data(),
                                mine.ranges.data(),
                                mine.keptCounts.data(),
                                mine.keptRanges.data(),
                                &mine.dispatched,
                                plan_.counts ? own.added.data() : nullptr,
                                plan_.measures ? own.waits.data() : nullptr};
  group_.callInTwo(rank, "dispatch " + std::to_string(round.number), call.exchange,
                   shape_.owners.size() * sizeof(uint32_t), kernelOf(dispatchSend, send),
                   kernelOf(dispatchReceive, receive));
}

void EpProgram::callExperts(const EpRound& round, int rank) {
  unsigned char* const target = answersOf(round, rank);
  const bool isInPlace = round.of[size_t(rank)].isInPlace;
  const size_t rowBytes = isInPlace ? answerBytes(false, shape_.hidden) : 2 * shape_.hidden;
  const Tensors& mine = tensors(round, rank);
  group_.run(rank, "experts", [this, &round, &mine, rank, target, rowBytes] {
    const Rank& own = of_[size_t(rank)];
    if (group_.state(rank).failed) return;
    for (size_t local = 0; local < own.mine.size(); ++local)
      for (size_t row = 0; row < size_t(mine.counts[local]); ++row)
        std::memcpy(target + (local * shape_.perExpert() + row) * rowBytes,
                    pool_.row(round.answerRow(own.mine[local], row)).data(), 2 * shape_.hidden);
  });
}

void EpProgram::callCombine(const EpRound& called, int rank) {
  const uint32_t of = called.of[size_t(rank)].handleOf;
  const EpRound& round = of ? plan_.rounds[of - 1] : called;
  Tensors& mine = tensors(round, rank);
  Rank& own = of_[size_t(rank)];
  const EpInputs& inputs = round.of[size_t(rank)];
  const void* const chosen =
      inputs.areWide ? static_cast<const void*>(inputs.wanted.data()) : mine.narrow[1].data();
  const Chosen wanted{chosen, inputs.areWide, inputs.tokens, inputs.topk};
  const ExpertCall call =
      callOf(rank, 200 + called.usesLogfmt, answerBytes(called.usesLogfmt, shape_.hidden));
  const CombineSend send{call,
                         maskOf(mine.combineMask),
                         wanted,
                         mine.choices.data(),
                         inputs.isInPlace ? nullptr : answersOf(round, rank),
                         called.usesLogfmt,
                         mine.keptCounts.data(),
                         mine.keptRanges.data(),
                         &mine.dispatched};
  const CombineReceive receive{call,
                               maskOf(mine.combineMask),
                               wanted,
                               mine.choices.data(),
                               inputs.weights.data(),
                               called.usesLogfmt,
                               called.renormalizes,
                               own.experts.data(),
                               &mine.dispatched,
                               reinterpret_cast<unsigned char*>(mine.combined.data() + plan_.shift),
                               reinterpret_cast<bool*>(mine.missing.data()),
                               plan_.measures ? own.waits.data() : nullptr};
  group_.callInTwo(rank, "combine " + std::to_string(called.number), call.exchange, 0,
                   kernelOf(combineSend, send), kernelOf(combineReceive, receive));
}

void EpProgram::check() {
  const uint64_t operations = plan_.rounds.size() * (plan_.combines ? 2 : 1);
  for (int rank = 0; rank < shape_.ranks; ++rank) {
    if (group_.isKilled(rank)) continue;
    SCOPED_TRACE("rank " + std::to_string(rank));
    if (!group_.isEvicted(rank)) {
      ASSERT_EQ(group_.state(rank).failed, 0u);
      ASSERT_EQ(group_.state(rank).done, group_.ended() + operations);
      ASSERT_EQ(group_.state(rank).entered, 0u);
    }
    std::vector<int32_t> added(of_[size_t(rank)].mine.size(), 3 + rank);
    for (const EpRound& round : plan_.rounds) {
      SCOPED_TRACE("round " + std::to_string(round.number));
      const uint64_t number = dispatchNumber(round);
      if (group_.mustHaveEnded(rank, number)) checkDispatch(round, rank, added);
      if (plan_.combines && group_.mustHaveEnded(rank, number + 1)) checkCombine(round, rank);
      if (::testing::Test::HasFatalFailure()) return;
    }
    if (group_.isEvicted(rank)) continue;
    if (plan_.counts) ASSERT_EQ(of_[size_t(rank)].added, added);
    for (int peer = 0; peer < shape_.ranks; ++peer) ASSERT_GE(waited(rank, peer), 0);
  }
}

uint64_t EpProgram::ofDispatch(const EpRound& round, int rank) const {
  return participantsOf(round, &EpInputs::mask, group_.sources(rank, dispatchNumber(round)));
}

// Ranks that take no part are no longer active for the caller.
void EpProgram::checkMask(const EpMask& before, const EpMask& after, uint64_t participants) const {
  for (size_t rank = 0; rank < before.ranks.size(); ++rank)
    ASSERT_EQ(after.ranks[rank], has(participants, int(rank)) ? before.ranks[rank] : 0);
}

// It does not know all ranks that took part.
void EpProgram::checkSkipped(const EpMask& before, const EpMask& after, int rank) {
  ++skipped_;
  if (!after.ranks.empty()) ASSERT_EQ(after.ranks[size_t(rank)], 0);
  for (size_t peer = 0; peer < before.ranks.size(); ++peer)
    ASSERT_TRUE(after.ranks[peer] == before.ranks[peer] || after.ranks[peer] == 0);
}

void EpProgram::checkDispatch(const EpRound& round, int rank, std::vector<int32_t>& added) {
  const uint64_t participants = ofDispatch(round, rank);
  const Tensors& mine = tensors(round, rank);
  const auto ranks = size_t(shape_.ranks);
  ASSERT_EQ(mine.dispatched.number, dispatchNumber(round));
  if (has(group_.sources(rank, dispatchNumber(round)), rank)) {
    ASSERT_EQ(mine.dispatched.participants, participants);
    checkMask(round.of[size_t(rank)].mask, mine.mask, participants);
  } else {
    ASSERT_FALSE(has(mine.dispatched.participants, rank));
    checkSkipped(round.of[size_t(rank)].mask, mine.mask, rank);
  }
  for (size_t local = 0; local < added.size(); ++local) {
    const int32_t expert = of_[size_t(rank)].mine[local];
    std::vector<Route> routes = routesTo(shape_, round, expert, participants);
    if (!has(participants, rank)) routes.clear();
    added[local] += int32_t(routes.size());
    ASSERT_EQ(size_t(mine.counts[local]), routes.size()) << "expert " << expert;
    int64_t begin = 0;
    for (size_t source = 0; source < ranks; ++source) {
      const auto count = int64_t(std::ranges::count(routes, int(source), &Route::source));
      const bool isIn = has(participants, rank) && has(participants, int(source));
      ASSERT_EQ(mine.ranges[local * ranks + source], isIn ? begin << 32 | count : 0);
      begin += count;
    }
    checkRows(round, rank, local, routes);
  }
  ASSERT_EQ(mine.keptCounts, mine.counts);
  ASSERT_EQ(mine.keptRanges, mine.ranges);
}

void EpProgram::checkRows(const EpRound& round, int rank, size_t local,
                          const std::vector<Route>& routes) {
  const Tensors& mine = tensors(round, rank);
  const bool isCast = round.kind != RowKind::kBf16, rounds = round.kind == RowKind::kFp8Rounded;
  const size_t channelBytes = isCast ? 1 : 2, scales = scalesOf(shape_.hidden);
  const size_t words = !isCast ? 0 : round.packsScales ? (scales + 3) / 4 : scales;
  for (size_t row = 0; row < routes.size(); ++row) {
    SCOPED_TRACE("expert " + std::to_string(local) + " row " + std::to_string(row));
    const size_t place = local * shape_.perExpert() + row;
    ASSERT_EQ(size_t(mine.sources[place]), routes[row].token);
    const size_t sent = round.tokenRow(routes[row].source, routes[row].token);
    const unsigned char* const channels =
        mine.rows.data() + 2 * plan_.shift + place * shape_.hidden * channelBytes;
    if (!isCast) {
      ASSERT_EQ(std::memcmp(channels, pool_.row(sent).data(), 2 * shape_.hidden), 0);
      continue;
    }
    ASSERT_EQ(std::memcmp(channels, pool_.codes(sent, rounds).data(), shape_.hidden), 0);
    const std::vector<float> due = pool_.scales(sent, rounds);
    std::vector<uint32_t> dueWords(words);
    for (size_t i = 0; i < scales; ++i) {
      if (round.packsScales) {
        dueWords[i / 4] |= uint32_t(ep::ue8m0Of(due[i])) << (i % 4 * 8);
      } else {
        dueWords[i] = ep::bitsOf(due[i]);
      }
    }
    for (size_t word = 0; word < words; ++word) {
      const size_t at = (local * words + word) * shape_.perExpert() + row;
      ASSERT_EQ(mine.scales[at], dueWords[word]) << "scale " << word;
    }
  }
}

void EpProgram::checkCombine(const EpRound& round, int rank) {
  const uint64_t number = dispatchNumber(round) + 1, from = group_.sources(rank, number);
  if (!group_.skipped()) ASSERT_EQ(group_.told(rank, number), from);
  const uint64_t first = ofDispatch(round, rank);
  const uint64_t both = first & participantsOf(round, &EpInputs::combineMask, from);
  const Tensors& mine = tensors(round, rank);
  if (has(group_.sources(rank, number - 1) & from, rank)) {
    checkMask(round.of[size_t(rank)].combineMask, mine.combineMask, both);
  } else {
    checkSkipped(round.of[size_t(rank)].combineMask, mine.combineMask, rank);
  }
  const Combined due = combined(shape_, round, pool_, rank, first, both);
  for (size_t token = 0; token < due.missing.size(); ++token) {
    SCOPED_TRACE("token " + std::to_string(token));
    ASSERT_EQ(mine.missing[token], due.missing[token] ? 1 : 0);
    missing_ += due.missing[token];
    const size_t begin = token * shape_.hidden;
    for (size_t i = begin; i < begin + shape_.hidden; ++i)
      ASSERT_EQ(mine.combined[plan_.shift + i], due.channels[i]) << "channel " << i - begin;
  }
  lostBetween_ += group_.members(number) != group_.members(number - 1);
}

}  // namespace mooncake::kernels
