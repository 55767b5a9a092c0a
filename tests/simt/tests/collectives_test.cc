#include <algorithm>
#include <cstdlib>
#include <deque>
#include <gtest/gtest.h>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "races.h"
#include "virtual_group.h"

namespace mooncake::kernels {
namespace {

using simt::kFindsRaces;
using simt::racesReported;
using simt::Report;
using simt::World;

constexpr uint64_t kSeeds = kFindsRaces ? 6 : 60;

uint64_t seedsOf(uint64_t usual) {
  const char* const factor = std::getenv("MOONCAKE_SIMT_SEEDS");
  return factor ? usual * uint64_t(std::atoi(factor)) : usual;
}

// What one seed draws. Tensors are large enough for several blocks, seldom a multiple of 16 bytes,
// and may begin at an odd element.
struct Case {
  Case(uint64_t seed, int ranks) : ranks(ranks), random(seed * 77 + 13) {
    blocks = 1 + draw(3);
    threads = 32u << draw(2);
    count = draw(5) == 0 ? draw(3) : 1 + draw(400);
    shift = draw(3) == 0 ? 1 : 0;
    rounds = 2 + draw(4);
  }
  unsigned draw(unsigned below) {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return unsigned(random % below);
  }

  int ranks;
  uint64_t random;
  unsigned blocks, threads;
  size_t count, shift;
  uint32_t rounds;
};

// Element `i` of a rank's input in a round.
int32_t inputOf(uint32_t round, int rank, size_t i) {
  return int32_t(round * 1009 + uint32_t(rank) * 131 + uint32_t(i) * 7);
}

enum class Verb {
  kAllReduce,
  kAllReduceInPlace,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kBroadcast
};
constexpr Verb kVerbs[] = {Verb::kAllReduce, Verb::kAllReduceInPlace, Verb::kReduceScatter,
                           Verb::kAllGather, Verb::kAllToAll,         Verb::kBroadcast};

// Tensors of one call of a rank, and the result that it expects.
struct Tensors {
  std::vector<int32_t> input, output;
  size_t shift = 0;  // elements before the output

  int32_t* result() { return output.data() + shift; }
};

// A program: in each round another verb, on all ranks.
class Program {
 public:
  Program(World& world, VirtualGroup& group, const Case& with, std::optional<Verb> only = {})
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
      }
    }
  }

  // Compares the results of living ranks with those of the contributors that the hosts agreed on.
  void check() {
    for (int rank = 0; rank < case_.ranks; ++rank) {
      if (group_.isKilled(rank)) continue;
      ASSERT_EQ(group_.state(rank).failed, 0u) << "rank " << rank;
      ASSERT_EQ(group_.state(rank).done, group_.ended() + case_.rounds) << "rank " << rank;
      for (uint32_t round = 1; round <= case_.rounds; ++round) checkRound(round, rank);
    }
  }

 private:
  size_t inputCount(Verb verb) const {
    const bool hasParts = verb == Verb::kReduceScatter || verb == Verb::kAllToAll;
    return case_.count * size_t(hasParts ? case_.ranks : 1);
  }

  void call(uint32_t round, int rank) {
    const Verb verb = verbs_[round - 1];
    Tensors& mine = tensors_[round - 1][size_t(rank)];
    const size_t inputs = inputCount(verb), all = case_.count * size_t(case_.ranks);
    mine.shift = case_.shift;
    mine.input.resize(inputs);
    for (size_t i = 0; i < inputs; ++i) mine.input[i] = inputOf(round, rank, i);
    mine.output.assign(all + mine.shift, -1);
    const void* input = mine.input.data();
    if (verb == Verb::kAllReduceInPlace) {
      std::ranges::copy(mine.input, mine.result());
      input = mine.result();
    }
    auto* const output = reinterpret_cast<unsigned char*>(mine.result());
    const size_t bytes = case_.count * 4;
    const uint64_t everybody = (uint64_t(1) << case_.ranks) - 1;
    const auto hash = uint32_t(int(verb) * 1000 + int(case_.count));
    const auto reduce = [=](size_t first, size_t count) {
      return [=](const Exchange& exchange) {
        reduceAll<int32_t>({exchange, first, count, output, Combine::kSum});
      };
    };
    const auto move = [=](uint64_t sources, size_t offset, size_t stride) {
      return [=](const Exchange& exchange) {
        moveAll({exchange, sources, offset, bytes, stride, output});
      };
    };
    VirtualGroup::Kernel kernel;
    switch (verb) {
      case Verb::kAllReduce:
      case Verb::kAllReduceInPlace:
        kernel = reduce(0, case_.count);
        break;
      case Verb::kReduceScatter:
        kernel = reduce(size_t(rank) * case_.count, case_.count);
        break;
      case Verb::kAllGather:
        kernel = move(everybody, 0, bytes);
        break;
      case Verb::kAllToAll:
        kernel = move(everybody, size_t(rank) * bytes, bytes);
        break;
      case Verb::kBroadcast:
        kernel = move(uint64_t(1) << rootOf(round), 0, 0);
        break;
    }
    group_.call(rank, "round " + std::to_string(round), input, inputs * 4, hash, kernel);
  }

  int rootOf(uint32_t round) const { return int(round) % case_.ranks; }

  void checkRound(uint32_t round, int rank) {
    const Verb verb = verbs_[round - 1];
    const uint64_t from = group_.contributors(group_.ended() + round);
    const int32_t* const result = tensors_[round - 1][size_t(rank)].result();
    const bool isReduced =
        verb == Verb::kAllReduce || verb == Verb::kAllReduceInPlace || verb == Verb::kReduceScatter;
    const size_t first =
        verb == Verb::kReduceScatter || verb == Verb::kAllToAll ? size_t(rank) * case_.count : 0;
    for (size_t i = 0; i < case_.count; ++i) {
      int32_t sum = 0;
      for (int peer = 0; peer < case_.ranks; ++peer) {
        const int32_t theirs = has(from, peer) ? inputOf(round, peer, first + i) : 0;
        sum += theirs;
        const bool isMoved = verb == Verb::kAllGather || verb == Verb::kAllToAll;
        if (isMoved) {
          ASSERT_EQ(result[size_t(peer) * case_.count + i], theirs)
              << "rank " << rank << " round " << round << " from rank " << peer;
        }
      }
      if (isReduced) {
        ASSERT_EQ(result[i], sum) << "rank " << rank << " round " << round << " element " << i;
      }
      const int root = rootOf(round);
      if (verb == Verb::kBroadcast) {
        ASSERT_EQ(result[i], has(from, root) ? inputOf(round, root, i) : 0)
            << "rank " << rank << " round " << round;
      }
    }
  }

  VirtualGroup& group_;
  const Case case_;
  std::vector<Verb> verbs_;
  std::vector<std::vector<Tensors>> tensors_;
};

// Numbers of 32 bits would wrap, or would be more than half of their range ahead of old signals.
constexpr uint64_t kEnded[] = {0, 0, (uint64_t(1) << 31) + 5, (uint64_t(1) << 32) - 2};

struct Swept {
  unsigned wentOn = 0, took = 0;  // decisions of hosts
};

// Draws programs by seeds and checks each. `disturb` may kill and stop ranks.
template <typename Disturb>
void sweep(int ranks, uint64_t seeds, Disturb disturb, Swept* swept = nullptr) {
  const unsigned races = racesReported();
  for (uint64_t seed = 1; seed <= seedsOf(seeds); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    World world({.seed = seed, .starveFor = seed % 3 ? 16u : 0u});
    Case drawn(seed, ranks);
    VirtualGroup group(world, {.ranks = ranks,
                               .blocks = drawn.blocks,
                               .threads = drawn.threads,
                               .halfBytes = 4 * 400 * size_t(ranks),
                               .ended = kEnded[seed % std::size(kEnded)]});
    Program program(world, group, drawn);
    disturb(world, group, drawn);
    group.start();
    const Report report = world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    program.check();
    if (::testing::Test::HasFatalFailure()) return;
    if (swept) {
      swept->wentOn += group.decided(Decision::kGoOn);
      swept->took += group.decided(Decision::kTake);
    }
    ASSERT_EQ(racesReported(), races);
  }
}

constexpr auto kNothing = [](World&, VirtualGroup&, Case&) {};

TEST(Collectives, OneRank) { sweep(1, kSeeds, kNothing); }
TEST(Collectives, TwoRanks) { sweep(2, kSeeds, kNothing); }
TEST(Collectives, FourRanks) { sweep(4, kSeeds, kNothing); }
TEST(Collectives, SevenRanks) { sweep(7, kSeeds / 2, kNothing); }

TEST(Collectives, GoOnWithoutAKilledRank) {
  Swept swept;
  for (int ranks = 2; ranks <= 4; ++ranks) {
    const auto killOne = [&](World&, VirtualGroup& group, Case& drawn) {
      group.kill(int(drawn.draw(unsigned(ranks))), 1 + drawn.draw(40 * unsigned(ranks)));
    };
    sweep(ranks, 3 * kSeeds, killOne, &swept);
  }
  EXPECT_GT(swept.wentOn, 0u);
  if (!kFindsRaces) EXPECT_GT(swept.took, 0u);  // it runs few seeds
}

TEST(Collectives, GoOnWithoutTwoKilledRanks) {
  sweep(5, 4 * kSeeds, [&](World&, VirtualGroup& group, Case& drawn) {
    const int first = int(drawn.draw(5));
    group.kill(first, 1 + drawn.draw(200));
    group.kill((first + 1 + int(drawn.draw(4))) % 5, 1 + drawn.draw(400));
  });
}

// Longer than the kernels' patience: one block waits on, and the others end.
TEST(Collectives, WaitForALateRank) {
  sweep(3, 2 * kSeeds, [&](World& world, VirtualGroup&, Case& drawn) {
    world.stop(int(drawn.draw(3)), 1 + drawn.draw(80), 50'000'000);
  });
}

TEST(Collectives, ALateRankAndAKilledOne) {
  sweep(4, 3 * kSeeds, [&](World& world, VirtualGroup& group, Case& drawn) {
    const int killed = int(drawn.draw(4));
    group.kill(killed, 1 + drawn.draw(160));
    world.stop((killed + 1) % 4, 1 + drawn.draw(160), 50'000'000);
  });
}

// A group whose second rank does not take part as it should.
struct Disturbed {
  explicit Disturbed(Hosts hosts, uint64_t seed)
      : world({.seed = seed}),
        group(world, {.ranks = 3, .hosts = hosts, .decisionNs = 90'000'000}) {}

  void reduce(int rank, uint32_t hash) {
    std::vector<int32_t>& tensor = tensors.emplace_back(64, rank);
    group.call(rank, "reduce", tensor.data(), 256, hash, [&tensor](const Exchange& exchange) {
      reduceAll<int32_t>(
          {exchange, 0, 64, reinterpret_cast<unsigned char*>(tensor.data()), Combine::kSum});
    });
  }

  World world;
  VirtualGroup group;
  std::deque<std::vector<int32_t>> tensors;
};

#ifdef MOONCAKE_SIMT_PLAIN_ACCESSES
// A rank reads each other rank's part once, over the wires between devices, and writes nothing there
// but its signals: one for each block and peer. In its own memory it reads its input, publishes it,
// reads that, and writes the result.
TEST(Collectives, MoveNoMoreBytesThanTheyMust) {
  constexpr int kRanks = 4;
  constexpr size_t kCount = 2048, kBytes = 4 * kCount;
  constexpr unsigned kBlocks = 2;
  for (const Verb verb :
       {Verb::kAllReduce, Verb::kReduceScatter, Verb::kAllGather, Verb::kAllToAll}) {
    const bool hasParts = verb == Verb::kReduceScatter || verb == Verb::kAllToAll;
    const size_t inputBytes = kBytes * (hasParts ? kRanks : 1);
    World world({.seed = 3});
    VirtualGroup group(world, {.ranks = kRanks, .blocks = kBlocks, .halfBytes = kBytes * kRanks});
    Case with(1, kRanks);
    with.count = kCount;
    with.shift = 0;
    with.rounds = 1;
    Program program(world, group, with, verb);
    group.start();
    const Report report = world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    program.check();
    const size_t outputBytes =
        verb == Verb::kAllGather || verb == Verb::kAllToAll ? kBytes * kRanks : kBytes;
    for (int rank = 0; rank < kRanks; ++rank) {
      const simt::Traffic& traffic = world.traffic(rank);
      EXPECT_EQ(traffic.bytesReadThere, kBytes * (kRanks - 1));
      EXPECT_EQ(traffic.bytesWrittenThere, 0u);
      EXPECT_EQ(traffic.bytesReadHere, inputBytes + kBytes);
      EXPECT_EQ(traffic.bytesWrittenHere, inputBytes + outputBytes);
      EXPECT_EQ(traffic.remoteStores, kBlocks * (kRanks - 1));
    }
  }
}
#endif

TEST(Collectives, KernelsEndThoughNoHostDecides) {
  for (uint64_t seed = 1; seed <= kSeeds / 2; ++seed) {
    Disturbed with(Hosts::kNone, seed);
    for (int round = 0; round < 3; ++round)
      for (int rank = 0; rank < 3; ++rank) with.reduce(rank, 1);
    with.group.kill(1, 5 + seed);
    with.group.start();
    const Report report = with.world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    for (const int rank : {0, 2}) {
      const GroupState& state = with.group.state(rank);
      if (state.done == 3) continue;
      EXPECT_EQ(Failure(state.failed), Failure::kUndecided);
      EXPECT_TRUE(has(with.group.host(rank).missing, 1));
    }
    // Once: later kernels of the group leave at once.
    EXPECT_LT(report.virtualNs, 150'000'000u);
  }
}

TEST(Collectives, ARefusalEndsTheGroup) {
  for (uint64_t seed = 1; seed <= kSeeds / 2; ++seed) {
    Disturbed with(Hosts::kRefuse, seed);
    for (int round = 0; round < 3; ++round)
      for (int rank = 0; rank < 3; ++rank) with.reduce(rank, 1);
    with.group.kill(1, 5 + seed);
    with.group.start();
    const Report report = with.world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    for (const int rank : {0, 2}) {
      if (with.group.state(rank).done < 3) {
        EXPECT_EQ(Failure(with.group.state(rank).failed), Failure::kRefused);
      }
    }
  }
}

// The host refuses before a kernel has looked at the decision before.
TEST(Collectives, ARefusalRightAfterADecision) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Disturbed with(Hosts::kNone, seed);
    with.reduce(0, 1);
    HostWords& host = with.group.host(0);
    with.world.host(0, "refuse", [&host] {
      storeReleaseSystem(&host.stop, 1);
      while (loadAcquireSystem(&host.stopped) != 1) relax();
      host.active = 7;
      host.decision = uint32_t(Decision::kGoOn);
      storeReleaseSystem(&host.decided, 1);
      storeRelaxedSystem(&host.decision, uint32_t(Decision::kRefuse));
      storeReleaseSystem(&host.decided, 2);
      storeReleaseSystem(&host.stop, 2);
    });
    const Report report = with.world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    EXPECT_EQ(Failure(with.group.state(0).failed), Failure::kRefused);
  }
}

TEST(Collectives, AnotherCallIsNamed) {
  for (uint64_t seed = 1; seed <= kSeeds / 2; ++seed) {
    Disturbed with(Hosts::kDecide, seed);
    for (int rank = 0; rank < 3; ++rank) with.reduce(rank, rank == 1 ? 2 : 1);
    with.group.start();
    const Report report = with.world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    for (int rank = 0; rank < 3; ++rank)
      EXPECT_EQ(Failure(with.group.host(rank).failed), Failure::kMismatch);
    EXPECT_EQ(with.group.host(0).failedRank, 1u);
    EXPECT_EQ(with.group.host(2).failedRank, 1u);
    EXPECT_NE(with.group.host(1).failedRank, 1u);
  }
}

}  // namespace
}  // namespace mooncake::kernels
