#include <gtest/gtest.h>
#include <utility>
#include <vector>

#include "collective_sweep.h"
#include "races.h"
#include "virtual_group.h"

namespace mooncake::kernels {
namespace {

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
  EXPECT_GT(swept.withoutRoot, 0u);
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

// The others take a rank for dead that has stopped in the middle of an operation, and overwrite what it
// still reads. It has the right results, or an error.
TEST(Collectives, ARankThatIsOutHasNoTornResult) {
  if (kFindsRaces) GTEST_SKIP() << "its reads race";
  for (int ranks = 2; ranks <= 4; ++ranks) {
    sweep(ranks, kSeeds, [&](World& world, VirtualGroup& group, Case& drawn) {
      const int out = int(drawn.draw(unsigned(ranks)));
      world.stop(out, 1 + drawn.draw(20 * unsigned(ranks)), 50'000'000);
      group.evict(out, drawn.draw(10));
    });
  }
}

// Hosts stop the kernels from another stream than that of the replays, in the middle of one.
TEST(Collectives, ReplaysGoOnWithoutKilledRanks) {
  Swept swept;
  for (int ranks = 2; ranks <= 4; ++ranks) {
    const auto kill = [&](World& world, VirtualGroup& group, Case& drawn) {
      const int first = int(drawn.draw(unsigned(ranks)));
      group.kill(first, 1 + drawn.draw(40 * unsigned(ranks)));
      if (ranks == 4) group.kill((first + 1) % 4, 1 + drawn.draw(400));
      if (ranks == 3) world.stop((first + 1) % 3, 1 + drawn.draw(80), 50'000'000);
    };
    sweep(ranks, 4 * kSeeds, kill, &swept, /*ofGraphs=*/true);
  }
  EXPECT_GT(swept.wentOn, 0u);
  if (!kFindsRaces) EXPECT_GT(swept.took, 0u);  // it runs few seeds
}

TEST(TwoShot, Ranks) {
  for (const int ranks : {1, 2, 3, 4, 7})
    sweep(ranks, kSeeds / 3, kNothing, nullptr, false, kTwoShotVerb);
}

// Ranks are killed, and another one stops for about as long as kernels are patient, or for longer.
// Then some blocks of a rank have ended an exchange at which others have stopped. Of graphs' ranks,
// none stops beside killed ones: there the emulator's time does not pass while hosts stop kernels.
void disturbTwoShot(bool ofGraphs) {
  Swept swept;
  for (int ranks = 3; ranks <= 5; ++ranks) {
    const auto disturb = [&](World& world, VirtualGroup& group, Case& drawn) {
      const int first = int(drawn.draw(unsigned(ranks)));
      const unsigned kills = drawn.draw(3);
      if (kills > 0) group.kill(first, 1 + drawn.draw(60 * unsigned(ranks)));
      if (kills > 1) group.kill((first + 1) % ranks, 1 + drawn.draw(400));
      const uint64_t stop = drawn.draw(2) ? 50'000'000 : 2'000'000;
      if (kills == 0 || (!ofGraphs && drawn.draw(2)))
        world.stop((first + 2) % ranks, 1 + drawn.draw(100), stop);
    };
    sweep(ranks, kFindsRaces ? 4 * kSeeds : kSeeds, disturb, &swept, ofGraphs, kTwoShotVerb);
  }
  EXPECT_GT(swept.wentOn, 0u);
  if (!kFindsRaces) EXPECT_GT(swept.took, 0u);  // it runs few seeds
}
TEST(TwoShot, GoesOnWithoutKilledRanks) { disturbTwoShot(false); }
TEST(TwoShot, ReplaysGoOnWithoutKilledRanks) { disturbTwoShot(true); }

#ifdef MOONCAKE_SIMT_PLAIN_ACCESSES
// A rank reads the parts that it needs of other ranks once, over the wires between devices, and
// writes nothing there but its signals: one for each block and peer. In its own memory it reads its
// input, publishes it, reads the part that it needs of that, and writes the result. Pieces cost
// signals of their own, and a copy of the result. A two-shot operation reads a segment of each input
// and one of the result from each rank, and writes one.
TEST(Collectives, MoveNoMoreBytesThanTheyMust) {
  constexpr int kRanks = 4;
  constexpr size_t kCount = 2048, kBytes = 4 * kCount;
  constexpr unsigned kBlocks = 2;
  std::vector<std::pair<Verb, unsigned>> shapes;
  for (const Verb verb : kVerbs) {
    shapes.emplace_back(verb, 1);
    shapes.emplace_back(verb, 4);
  }
  for (const auto& [verb, pieces] : shapes) {
    World world({.seed = 3});
    VirtualGroup group(world, {.ranks = kRanks, .blocks = kBlocks, .bankBytes = kBytes * kRanks});
    Case with(1, kRanks);
    with.count = kCount;
    with.shift = 0;
    with.gap = 0;
    with.piece = kCount / pieces;
    with.rounds = 1;
    Program program(world, group, with, verb);
    group.start();
    const Report report = world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    program.check();
    for (int rank = 0; rank < kRanks; ++rank) {
      const size_t inputs = program.inputs(rank), outputs = program.outputs(rank);
      const bool isFromRoot = verb == Verb::kBroadcast || verb == Verb::kScatter;
      const bool isRoot = inputs && isFromRoot;
      const size_t read = outputs ? (isFromRoot ? !isRoot : kRanks - 1) : 0;
      const size_t own = outputs && (!isFromRoot || isRoot);
      const size_t again = pieces > 1 && outputs == 1;
      const size_t shots = isTwoShot(verb) ? 2 : 1, segment = kBytes / kRanks;
      const simt::Traffic& traffic = world.traffic(rank);
      EXPECT_EQ(traffic.bytesReadThere, (shots == 2 ? 2 * segment : kBytes) * read);
      EXPECT_EQ(traffic.bytesWrittenThere, 0u);
      EXPECT_EQ(traffic.bytesReadHere,
                kBytes * (inputs + again) + (shots == 2 ? 2 * segment : kBytes) * own);
      EXPECT_EQ(traffic.bytesWrittenHere,
                kBytes * (inputs + outputs + again) + (shots == 2 ? segment : 0));
      EXPECT_EQ(traffic.remoteStores, shots * pieces * kBlocks * (kRanks - 1));
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
      EmulatedDecisions decisions(host);
      decisions.stop();
      while (!decisions.haveStopped()) relax();
      decisions.decide({.active = 7, .serial = host.taken});
      decisions.refuse();
    });
    const Report report = with.world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    EXPECT_EQ(Failure(with.group.state(0).failed), Failure::kRefused);
  }
}

// A kernel may read the words of the decision while its host refuses. Each operation that it ends has
// the data of that operation.
TEST(Collectives, ARefusalLeavesTheDecisionAsItIs) {
  unsigned wrong = 0, ended = 0;
  const unsigned races = racesReported();
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Disturbed with(Hosts::kDecideThenRefuse, seed);
    const std::vector<int32_t>* tensors[3][5];
    for (int round = 0; round < 5; ++round)
      for (int rank = 0; rank < 3; ++rank) tensors[rank][round] = &with.reduce(rank, 1);
    with.group.kill(1, 20 + seed % 20);
    with.group.start();
    const Report report = with.world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    bool isWrong = false;
    for (const int rank : {0, 2}) {
      for (uint64_t call = 1; call <= with.group.state(rank).done; ++call, ++ended) {
        int32_t sum = 0;
        for (int peer = 0; peer < 3; ++peer)
          if (has(with.group.told(rank, call), peer)) sum += Disturbed::inputOf(call, peer);
        isWrong |= *tensors[rank][call - 1] != std::vector<int32_t>(64, sum);
      }
    }
    wrong += isWrong;
  }
  EXPECT_EQ(wrong, 0u);
  EXPECT_GT(ended, 0u);
  EXPECT_EQ(racesReported(), races);
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
