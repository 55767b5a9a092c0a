#include "splits_program.h"

#include <gtest/gtest.h>
#include <string>

namespace mooncake::kernels {
namespace {

constexpr unsigned char kUntouched = 0xa5;

unsigned char byteOf(uint32_t round, int from, int to, size_t i) {
  return static_cast<unsigned char>(round * 101 + uint32_t(from) * 31 + uint32_t(to) * 17 + i * 7);
}

}  // namespace

SplitCase::SplitCase(uint64_t seed, int ranks, bool hasMisfits)
    : ranks(ranks), random(seed * 91 + 7) {
  blocks = 1 + draw(3);
  threads = 32u << draw(2);
  bankBytes = kTableBytes + kSegmentUnit * (size_t(ranks) + 1 + draw(100));
  shift = draw(2) ? draw(40) : 0;
  gap = draw(2) ? draw(5) : 0;
  const unsigned largest = 1 + draw(800);
  rounds.resize(2 + draw(3));
  for (Round& round : rounds) {
    round.isShared = draw(4) == 0;
    for (int from = 0; from < ranks; ++from) {
      auto& sent = round.sent.emplace_back();
      for (int to = 0; to < ranks; ++to) {
        const size_t drawn = draw(3) == 0 ? 0 : draw(largest);
        sent.push_back(round.isShared && to ? sent[0] : drawn);
      }
    }
    round.expected = round.sent;
    if (hasMisfits && draw(3) == 0)
      round.expected[draw(unsigned(ranks))][draw(unsigned(ranks))] += 1 + draw(20);
  }
}

SplitProgram::SplitProgram(simt::World& world, VirtualGroup& group, const SplitCase& with)
    : group_(group), case_(with), told_(size_t(with.ranks)) {
  for (uint32_t number = 1; number <= case_.rounds.size(); ++number) {
    tensors_.emplace_back(size_t(case_.ranks));
    for (int rank = 0; rank < case_.ranks; ++rank) {
      call(number, rank);
      Tensors& mine = tensors_.back()[size_t(rank)];
      world.own(rank, mine.input.data(), mine.input.size());
      world.own(rank, mine.output.data(), mine.output.size());
    }
  }
}

void SplitProgram::call(uint32_t number, int rank) {
  const SplitCase::Round& round = case_.round(number);
  Tensors& mine = tensors_[number - 1][size_t(rank)];
  const auto& sent = round.sent[size_t(rank)];
  const unsigned segments = round.isShared ? 1 : unsigned(case_.ranks);
  std::vector<size_t> inputs, outputs;  // places
  mine.input.assign(case_.shift, kUntouched);
  for (unsigned to = 0; to < segments; ++to) {
    inputs.push_back(mine.input.size());
    for (size_t i = 0; i < sent[to]; ++i)
      mine.input.push_back(byteOf(number, rank, round.isShared ? 0 : int(to), i));
    mine.input.resize(mine.input.size() + case_.gap, kUntouched);
  }
  mine.output.assign(case_.shift, kUntouched);
  for (int from = 0; from < case_.ranks; ++from) {
    outputs.push_back(mine.output.size());
    const size_t expected = round.expected[size_t(from)][size_t(rank)];
    mine.output.resize(mine.output.size() + expected + case_.gap, kUntouched);
  }
  AllToAllArguments& arguments = mine.arguments;
  arguments.exchange.call = 1 + round.isShared;
  arguments.exchange.root = -1;
  layOutSegments(arguments, sent.data(), segments, case_.bankBytes);
  for (unsigned to = 0; to < segments; ++to)
    arguments.exchange.inputs[to] = mine.input.data() + inputs[to];
  for (int from = 0; from < case_.ranks; ++from) {
    arguments.from[from] = round.expected[size_t(from)][size_t(rank)];
    arguments.outputs[from] = mine.output.data() + outputs[size_t(from)];
  }
  group_.call(rank, "round " + std::to_string(number), arguments.exchange,
              [arguments = mine.arguments](const Exchange& made) {
                AllToAllArguments completed = arguments;
                completed.exchange = made;
                exchangeSegments(completed);
              });
}

bool SplitProgram::doFit(const SplitCase::Round& round, uint64_t from) const {
  for (int sender = 0; sender < case_.ranks; ++sender) {
    for (int to = 0; to < case_.ranks; ++to) {
      if (has(from, sender) && has(from, to) &&
          round.sent[size_t(sender)][size_t(to)] != round.expected[size_t(sender)][size_t(to)])
        return false;
    }
  }
  return true;
}

void SplitProgram::check() {
  const uint64_t rounds = case_.rounds.size();
  for (int rank = 0; rank < case_.ranks; ++rank) {
    if (group_.isKilled(rank)) continue;
    ASSERT_EQ(group_.state(rank).failed, 0u) << "rank " << rank;
    ASSERT_EQ(group_.state(rank).done, group_.ended() + rounds) << "rank " << rank;
    ASSERT_EQ(group_.state(rank).entered, 0u) << "rank " << rank;
    for (uint32_t number = 1; number <= rounds; ++number) checkRound(number, rank);
    ASSERT_EQ(group_.host(rank).misfitCount, told_[size_t(rank)]);
  }
}

void SplitProgram::checkRound(uint32_t number, int rank) {
  const SplitCase::Round& round = case_.round(number);
  const uint64_t contributors = group_.contributors(group_.ended() + number);
  ASSERT_EQ(group_.told(rank, group_.ended() + number), contributors) << "rank " << rank;
  const bool hasResult = doFit(round, contributors);
  if (!hasResult) checkMisfit(number, rank, contributors);
  std::vector<unsigned char> wanted(case_.shift, kUntouched);
  for (int from = 0; from < case_.ranks; ++from) {
    for (size_t i = 0; i < round.expected[size_t(from)][size_t(rank)]; ++i) {
      wanted.push_back(!hasResult ? kUntouched
                       : has(contributors, from)
                           ? byteOf(number, from, round.isShared ? 0 : rank, i)
                           : 0);
    }
    wanted.resize(wanted.size() + case_.gap, kUntouched);
  }
  const auto& found = tensors_[number - 1][size_t(rank)].output;
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i)
    ASSERT_EQ(found[i], wanted[i]) << "rank " << rank << " round " << number << " byte " << i;
}

void SplitProgram::checkMisfit(uint32_t number, int rank, uint64_t from) {
  ++misfits_;
  const Misfit& told = group_.host(rank).misfits[told_[size_t(rank)]++];
  ASSERT_EQ(told.call, number);
  ASSERT_EQ(told.count, 1u);
  const Misfit::Pair& pair = told.pairs[0];
  ASSERT_TRUE(has(from, pair.from) && has(from, pair.to));
  const SplitCase::Round& round = case_.round(number);
  ASSERT_EQ(pair.sent, round.sent[size_t(pair.from)][size_t(pair.to)]);
  ASSERT_EQ(pair.expected, round.expected[size_t(pair.from)][size_t(pair.to)]);
  ASSERT_NE(pair.sent, pair.expected);
}

}  // namespace mooncake::kernels
