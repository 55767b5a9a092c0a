#include <gtest/gtest.h>
#include <optional>
#include <vector>

#include "collective_sweep.h"
#include "races.h"
#include "virtual_group.h"

// Collectives of ranks on several hosts, whose proxies carry the data.
namespace mooncake::kernels {
namespace {

// The host of each rank.
const std::vector<int> kSplits[] = {{0, 1},    {0, 0, 1},    {0, 1, 1},
                                    {0, 1, 2}, {0, 0, 0, 1}, {0, 1, 0, 1}};

constexpr OnlyVerb kAllReduceVerb = [](uint64_t seed) {
  return std::optional(seed % 2 ? Verb::kAllReduce : Verb::kAllReduceInPlace);
};

void sweepSplits(OnlyVerb only) {
  for (const std::vector<int>& hosts : kSplits)
    sweep(int(hosts.size()), kSeeds / 5, kNothing, nullptr, false, only, hosts);
}
TEST(Hosts, AllVerbs) { sweepSplits(kAnyVerb); }
TEST(Hosts, TwoShot) { sweepSplits(kTwoShotVerb); }

void disturbSplits(OnlyVerb only, bool ofGraphs, uint64_t seeds) {
  Swept swept;
  for (const std::vector<int>& hosts : kSplits) {
    const int ranks = int(hosts.size());
    const auto disturb = [&](World& world, VirtualGroup& group, Case& drawn) {
      const int first = int(drawn.draw(unsigned(ranks)));
      const unsigned most = 200 * unsigned(ranks);
      const unsigned kills = drawn.draw(ranks > 2 ? 3 : 2);
      if (kills > 0) group.kill(first, 1 + drawn.draw(most));
      if (kills > 1) group.kill((first + 1) % ranks, 1 + drawn.draw(2 * most));
      const uint64_t stop = drawn.draw(2) ? 50'000'000 : 2'000'000;
      if (kills == 0 || (!ofGraphs && drawn.draw(2)))
        world.stop((first + 2) % ranks, 1 + drawn.draw(most), stop);
    };
    sweep(ranks, seeds, disturb, &swept, ofGraphs, only, hosts);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(swept.wentOn, 0u);
  if (!kFindsRaces && !ofGraphs) EXPECT_GT(swept.took, 0u);  // they run few seeds
}
constexpr uint64_t kFew = kFindsRaces ? 2 : kSeeds / 6;
TEST(Hosts, OneShotGoesOn) { disturbSplits(kAllReduceVerb, false, kFew); }
TEST(Hosts, AllVerbsGoOn) { disturbSplits(kAnyVerb, false, kFew); }
TEST(Hosts, TwoShotGoesOn) { disturbSplits(kTwoShotVerb, false, kFew); }
TEST(Hosts, ReplaysGoOn) { disturbSplits(kAnyVerb, true, kFew); }

// A remote rank gets only bytes that it reads, and each of them once.
TEST(Hosts, PushNoMoreBytesThanTheyMust) {
  constexpr int kRanks = 4;
  constexpr size_t kCount = 2048, kBytes = 4 * kCount;
  for (const Verb verb : kVerbs) {
    for (const unsigned pieces : {1, 4}) {
      World world({.seed = 3});
      VirtualGroup group(world,
                         {.ranks = kRanks, .halfBytes = kBytes * kRanks, .hostOf = {0, 0, 1, 1}});
      Case with(1, kRanks);
      with.blocks = 2;
      with.count = kCount;
      with.shift = with.gap = 0;
      with.piece = kCount / pieces;
      with.rounds = 1;
      Program program(world, group, with, verb);
      group.start();
      const Report report = world.run();
      ASSERT_TRUE(report.ok) << report.problem;
      program.check();
      const bool isToRoot = verb == Verb::kReduce || verb == Verb::kGather;
      for (int rank = 0; rank < kRanks; ++rank) {
        for (int peer = 0; peer < kRanks; ++peer) {
          if (rank / 2 == peer / 2) continue;
          const bool isRead = program.inputs(rank) && (!isToRoot || peer == 1);
          // A segment of the input, and the own one.
          const size_t bytes = isTwoShot(verb) ? 2 * kBytes / kRanks : kBytes;
          EXPECT_EQ(group.pushed(rank, peer), isRead ? bytes : 0) << "verb " << int(verb);
        }
      }
    }
  }
}

TEST(Hosts, KernelsEndThoughNoHostDecides) {
  for (uint64_t seed = 1; seed <= kSeeds / 3; ++seed) {
    Disturbed with(Hosts::kNone, seed, {0, 1, 1});
    for (int round = 0; round < 3; ++round)
      for (int rank = 0; rank < 3; ++rank) with.reduce(rank, 1);
    with.group.kill(1, 5 + 10 * seed);
    with.group.start();
    const Report report = with.world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    for (const int rank : {0, 2}) {
      const GroupState& state = with.group.state(rank);
      if (state.done == 3) continue;
      EXPECT_EQ(Failure(state.failed), Failure::kUndecided);
      EXPECT_NE(with.group.host(rank).missing, 0u);
    }
  }
}

// A command is refused, because the ring stays full for too long. The rank gets no mail then, also
// when the ring goes on: it would believe that it has all data.
TEST(Hosts, ARefusedCommandIsNoWrongResult) {
  unsigned failed = 0;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    if (seed % 3 == 0) continue;  // its rings have many slots
    Disturbed with(Hosts::kNone, seed, {0, 1, 1}, 900'000'000);
    for (int round = 0; round < 3; ++round)
      for (int rank = 0; rank < 3; ++rank) with.reduce(rank, 1);
    with.group.proxy(0).delay(1, 1 + uint32_t(seed) % 6, VirtualProxy::kTimeoutNs * 5 / 4);
    with.group.start();
    const Report report = with.world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    for (int rank = 0; rank < 3; ++rank) {
      const GroupState& state = with.group.state(rank);
      failed += state.failed != 0;
      for (size_t round = 0; round < state.done; ++round)
        for (const int32_t sum : with.tensors[round * 3 + size_t(rank)]) ASSERT_EQ(sum, 0 + 1 + 2);
    }
  }
  EXPECT_GT(failed, 0u);
}

TEST(Hosts, AnotherCallIsNamed) {
  for (uint64_t seed = 1; seed <= kSeeds / 3; ++seed) {
    Disturbed with(Hosts::kDecide, seed, {0, 1, 1});
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
