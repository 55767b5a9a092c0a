#include "collective_program.h"

#include <gtest/gtest.h>
#include <iterator>
#include <string>

namespace mooncake::kernels {
namespace {

constexpr int32_t kUntouched = -1;

// Element `i` of a rank's input in a round.
int32_t inputOf(uint32_t round, int rank, size_t i) {
  return int32_t(round * 1009 + uint32_t(rank) * 131 + uint32_t(i) * 7);
}

bool hasRoot(Verb verb) {
  return verb == Verb::kReduce || verb == Verb::kGather || verb == Verb::kBroadcast ||
         verb == Verb::kScatter;
}
bool isInPlace(Verb verb) {
  return verb == Verb::kAllReduceInPlace || verb == Verb::kTwoShotInPlace;
}
bool reduces(Verb verb) {
  return verb == Verb::kAllReduce || isInPlace(verb) || isTwoShot(verb) ||
         verb == Verb::kReduceScatter || verb == Verb::kReduce;
}
// The output has a place for each rank.
bool gathers(Verb verb) {
  return verb == Verb::kAllGather || verb == Verb::kGather || verb == Verb::kAllToAll;
}

}  // namespace

Program::Program(simt::World& world, VirtualGroup& group, const Case& with,
                 std::optional<Verb> only)
    : group_(group), case_(with) {
  for (uint32_t round = 1; round <= with.rounds; ++round) {
    tensors_.emplace_back(size_t(with.ranks));
    verbs_.push_back(only.value_or(kVerbs[(with.random + round) % std::size(kVerbs)]));
    for (int rank = 0; rank < with.ranks; ++rank) call(round, rank);
  }
  for (auto& round : tensors_) {
    for (int rank = 0; rank < with.ranks; ++rank) {
      Tensors& mine = round[size_t(rank)];
      world.own(rank, mine.input.data(), mine.input.size() * 4);
      world.own(rank, mine.output.data(), mine.output.size() * 4);
      world.own(rank, mine.scratch.data(), mine.scratch.size() * 4);
    }
  }
}

void Program::call(uint32_t round, int rank) {
  const Verb verb = verbs_[round - 1];
  Tensors& mine = tensors_[round - 1][size_t(rank)];
  const auto ranks = size_t(case_.ranks);
  const bool isRoot = rank == rootOf(round);
  const bool gives = isRoot || (verb != Verb::kBroadcast && verb != Verb::kScatter);
  const bool takes = verb == Verb::kReduce || verb == Verb::kGather ? isRoot
                     : verb == Verb::kBroadcast                     ? !isRoot
                                                                    : true;
  mine.inputs = gives ? (hasParts(verb) ? ranks : 1) : 0;
  mine.outputs = takes ? (gathers(verb) ? ranks : 1) : 0;
  mine.input.assign(place(ranks), kUntouched);
  mine.output.assign(place(ranks), kUntouched);
  for (size_t part = 0; part < mine.inputs; ++part)
    for (size_t i = 0; i < case_.count; ++i)
      mine.input[place(part) + i] = inputOf(round, rank, part * case_.count + i);
  if (isInPlace(verb)) mine.output = mine.input;

  mine.scratch.assign(place(1), kUntouched);

  const Exchange exchange = exchangeOf(verb, round, mine);
  const size_t bytes = takes ? case_.count * 4 : 0;
  const size_t stride = case_.hasPieces() ? case_.piece : case_.count;
  const size_t offset = hasParts(verb) ? size_t(rank) * stride * 4 : 0;
  VirtualGroup::Kernel kernel;
  if (reduces(verb)) {
    auto* const output = reinterpret_cast<unsigned char*>(mine.output.data() + place(0));
    kernel = [=](const Exchange& made) {
      reduceAll<int32_t>({made, offset, bytes, output, Combine::kSum});
    };
  } else {
    const uint64_t everybody = (uint64_t(1) << case_.ranks) - 1;
    const uint64_t sources = gathers(verb) ? everybody : uint64_t(1) << rootOf(round);
    MoveArguments move{{}, takes ? sources : 0, offset, bytes, {}};
    for (size_t peer = 0; peer < ranks && takes; ++peer) {
      move.outputs[peer] =
          reinterpret_cast<unsigned char*>(mine.output.data() + place(gathers(verb) ? peer : 0));
    }
    kernel = [move](const Exchange& made) {
      MoveArguments arguments = move;
      arguments.exchange = made;
      moveAll(arguments);
    };
  }
  group_.call(rank, "round " + std::to_string(round), exchange, kernel);
}

// As PeerCollectives makes it.
Exchange Program::exchangeOf(Verb verb, uint32_t round, Tensors& mine) const {
  Exchange exchange{};
  exchange.call = uint32_t(int(verb) * 1000 + int(case_.count));
  exchange.root = hasRoot(verb) ? rootOf(round) : -1;
  exchange.pieces = case_.hasPieces() ? unsigned((case_.count - 1) / case_.piece + 1) : 1;
  exchange.isTwoShot = isTwoShot(verb);
  exchange.readers = hasParts(verb)    ? Readers::kOwnPart
                     : hasReader(verb) ? Readers::kRoot
                                       : Readers::kAll;
  exchange.bytes = case_.count * 4;
  exchange.inputCount = unsigned(mine.inputs);
  const int32_t* const input = isInPlace(verb) ? mine.output.data() : mine.input.data();
  for (size_t part = 0; part < mine.inputs; ++part)
    exchange.inputs[part] = reinterpret_cast<const unsigned char*>(input + place(part));
  if (!case_.gap && mine.inputs && exchange.pieces == 1) {
    exchange.bytes *= mine.inputs;
    exchange.inputCount = 1;
  }
  exchange.piece = exchange.pieces > 1 ? case_.piece * 4 : exchange.bytes;
  if (exchange.pieces > 1 && !gathers(verb)) {
    exchange.scratch = reinterpret_cast<unsigned char*>(mine.scratch.data() + case_.shift);
    exchange.output = reinterpret_cast<unsigned char*>(mine.output.data() + place(0));
  }
  return exchange;
}

void Program::check() {
  for (int rank = 0; rank < case_.ranks; ++rank) {
    if (group_.isKilled(rank)) continue;
    if (group_.isEvicted(rank)) {
      for (uint32_t round = 1; group_.ended() + round <= group_.state(rank).done; ++round)
        checkRound(round, rank, group_.told(rank, group_.ended() + round));
      continue;
    }
    ASSERT_EQ(group_.state(rank).failed, 0u) << "rank " << rank;
    ASSERT_EQ(group_.state(rank).done, group_.ended() + case_.rounds) << "rank " << rank;
    ASSERT_EQ(group_.state(rank).entered, 0u) << "rank " << rank;
    for (uint32_t round = 1; round <= case_.rounds; ++round) {
      const uint64_t from = group_.contributors(group_.ended() + round);
      ASSERT_EQ(group_.told(rank, group_.ended() + round), from) << "rank " << rank;
      checkRound(round, rank, from);
    }
  }
}

int32_t Program::expected(uint32_t round, int rank, size_t place, size_t i, uint64_t from) const {
  const Verb verb = verbs_[round - 1];
  const size_t at = (hasParts(verb) ? size_t(rank) * case_.count : 0) + i;
  if (!reduces(verb)) {
    const int source = gathers(verb) ? int(place) : rootOf(round);
    return has(from, source) ? inputOf(round, source, at) : 0;
  }
  int32_t sum = 0;
  for (int peer = 0; peer < case_.ranks; ++peer)
    if (has(from, peer)) sum += inputOf(round, peer, at);
  return sum;
}

// Without its root, an operation changes nothing.
void Program::checkRound(uint32_t round, int rank, uint64_t from) {
  const Tensors& mine = tensors_[round - 1][size_t(rank)];
  const bool hasResult = !hasRoot(verbs_[round - 1]) || has(from, rootOf(round));
  if (!hasResult) ++withoutRoot_;
  std::vector<int32_t> wanted(mine.output.size(), kUntouched);
  for (size_t out = 0; out < mine.outputs && hasResult; ++out)
    for (size_t i = 0; i < case_.count; ++i)
      wanted[place(out) + i] = expected(round, rank, out, i, from);
  for (size_t i = 0; i < wanted.size(); ++i) {
    ASSERT_EQ(mine.output[i], wanted[i]) << "rank " << rank << " round " << round << " verb "
                                         << int(verbs_[round - 1]) << " element " << i;
  }
}

}  // namespace mooncake::kernels
