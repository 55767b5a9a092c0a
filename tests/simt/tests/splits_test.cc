#include <cstdlib>
#include <gtest/gtest.h>
#include <iterator>
#include <string>
#include <vector>

#include "races.h"
#include "splits_program.h"
#include "virtual_group.h"

namespace mooncake::kernels {
namespace {

using simt::kFindsRaces;
using simt::racesReported;
using simt::Report;
using simt::World;

constexpr uint64_t kSeeds = kFindsRaces ? 6 : 60;
constexpr uint64_t kEnded[] = {0, 0, (uint64_t(1) << 31) + 5, (uint64_t(1) << 32) - 2};

uint64_t seedsOf(uint64_t usual) {
  const char* const factor = std::getenv("MOONCAKE_SIMT_SEEDS");
  return factor ? usual * uint64_t(std::atoi(factor)) : usual;
}

struct Swept {
  unsigned wentOn = 0, took = 0;  // decisions of hosts
  unsigned misfits = 0;           // calls
};

struct Kind {
  bool ofGraphs = false, hasMisfits = false;
  std::vector<int> hosts = {};
};

// Draws programs by seeds and checks each. `disturb` may kill and stop ranks.
template <typename Disturb>
Swept sweep(int ranks, uint64_t seeds, Kind kind, Disturb disturb) {
  Swept swept;
  const unsigned races = racesReported();
  for (uint64_t seed = 1; seed <= seedsOf(seeds); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    World world({.seed = seed, .starveFor = seed % 3 ? 16u : 0u});
    SplitCase drawn(seed, ranks, kind.hasMisfits);
    VirtualGroup group(world, {.ranks = ranks,
                               .blocks = drawn.blocks,
                               .threads = drawn.threads,
                               .bankBytes = drawn.bankBytes,
                               .ended = kEnded[seed % std::size(kEnded)],
                               .ofGraphs = kind.ofGraphs,
                               .hostOf = kind.hosts,
                               .seed = seed});
    SplitProgram program(world, group, drawn);
    disturb(world, group, drawn);
    group.start();
    const Report report = world.run();
    EXPECT_TRUE(report.ok) << report.problem;
    if (report.ok) program.check();
    group.checkPushes();
    group.checkChanges();
    EXPECT_EQ(racesReported(), races);
    swept.wentOn += group.decided(Decision::kGoOn);
    swept.took += group.decided(Decision::kTake);
    swept.misfits += program.misfits();
    if (::testing::Test::HasFailure()) break;
  }
  return swept;
}

constexpr auto kNothing = [](World&, VirtualGroup&, SplitCase&) {};

TEST(AllToAll, Ranks) {
  for (const int ranks : {1, 2, 3, 4, 7}) sweep(ranks, kSeeds / 2, {}, kNothing);
}

TEST(AllToAll, SplitsThatDoNotFit) {
  const Swept swept = sweep(3, kSeeds, {.hasMisfits = true}, kNothing);
  EXPECT_GT(swept.misfits, 0u);
}

void disturb(Kind kind) {
  Swept all;
  for (int ranks = 2; ranks <= 5; ++ranks) {
    const auto one = [&](World& world, VirtualGroup& group, SplitCase& drawn) {
      const int first = int(drawn.draw(unsigned(ranks)));
      group.kill(first, 1 + drawn.draw(50 * unsigned(ranks)));
      if (ranks == 5) group.kill((first + 1) % ranks, 1 + drawn.draw(400));
      // Of graphs' ranks, none stops beside killed ones; see collectives_test.cc.
      if (ranks > 2 && !kind.ofGraphs && drawn.draw(2)) {
        const uint64_t time = drawn.draw(2) ? 50'000'000 : 2'000'000;
        world.stop((first + 2) % ranks, 1 + drawn.draw(100), time);
      }
    };
    const Swept swept = sweep(ranks, 2 * kSeeds, kind, one);
    all.wentOn += swept.wentOn;
    all.took += swept.took;
    all.misfits += swept.misfits;
  }
  EXPECT_GT(all.wentOn, 0u);
  if (!kFindsRaces) EXPECT_GT(all.took, 0u);  // it runs few seeds
  if (kind.hasMisfits) EXPECT_GT(all.misfits, 0u);
}
TEST(AllToAll, GoesOnWithoutKilledRanks) { disturb({}); }
TEST(AllToAll, ReplaysGoOnWithoutKilledRanks) { disturb({.ofGraphs = true}); }
TEST(AllToAll, SplitsThatFitWithoutAKilledRank) { disturb({.hasMisfits = true}); }

const std::vector<int> kSplits[] = {{0, 1}, {0, 0, 1}, {0, 1, 1}, {0, 1, 2}, {0, 0, 0, 1}};

TEST(AllToAllHosts, Ranks) {
  for (const auto& hosts : kSplits)
    sweep(int(hosts.size()), kSeeds / 2, {.hasMisfits = true, .hosts = hosts}, kNothing);
}
TEST(AllToAllHosts, GoesOnWithoutKilledRanks) {
  Swept all;
  for (const auto& hosts : kSplits) {
    const auto ranks = unsigned(hosts.size());
    const auto one = [&](World& world, VirtualGroup& group, SplitCase& drawn) {
      const unsigned first = drawn.draw(ranks), most = 200 * ranks;
      group.kill(int(first), 1 + drawn.draw(most));
      if (ranks > 2 && drawn.draw(2)) group.kill(int((first + 1) % ranks), 1 + drawn.draw(most));
      if (drawn.draw(2)) world.stop(int((first + 2) % ranks), 1 + drawn.draw(most), 50'000'000);
    };
    const Swept swept = sweep(int(ranks), kSeeds, {.hasMisfits = true, .hosts = hosts}, one);
    all.wentOn += swept.wentOn;
    all.took += swept.took;
  }
  EXPECT_GT(all.wentOn, 0u);
  if (!kFindsRaces) EXPECT_GT(all.took, 0u);  // it runs few seeds
}

// An input for all ranks, and the table beside it, go to one rank of each other host.
TEST(AllToAllHosts, AnInputForAllCrossesOnce) {
  constexpr int kRanks = 3;
  constexpr size_t kBytes = 4096;
  SplitCase with(3, kRanks, false);
  with.blocks = 2;
  with.bankBytes = kBytes + kSplitBytes;
  with.rounds.assign(1, {true, {}, {}});
  with.rounds[0].sent.assign(kRanks, std::vector<size_t>(kRanks, kBytes));
  with.rounds[0].expected = with.rounds[0].sent;
  World world({.seed = 3});
  VirtualGroup group(
      world, {.ranks = kRanks, .blocks = 2, .bankBytes = with.bankBytes, .hostOf = {0, 1, 1}});
  SplitProgram program(world, group, with);
  group.start();
  const Report report = world.run();
  ASSERT_TRUE(report.ok) << report.problem;
  program.check();
  const size_t least = kBytes + sizeof(SplitTable);
  EXPECT_EQ(group.pushed(0, 1).data + group.pushed(0, 2).data, least);
  EXPECT_EQ(group.pushed(1, 0).data, least);
  EXPECT_EQ(group.pushed(2, 0).data, least);
}

// Longer than the kernels' patience: one block waits on, and the others end.
TEST(AllToAll, WaitsForALateRank) {
  sweep(3, 2 * kSeeds, {.hasMisfits = true}, [](World& world, VirtualGroup&, SplitCase& drawn) {
    world.stop(int(drawn.draw(3)), 1 + drawn.draw(120), 50'000'000);
  });
}

// A graph has no error for one operation.
TEST(AllToAll, AReplayWithSplitsThatDoNotFitFailsTheGroup) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    SplitCase drawn(seed, 3, true);
    drawn.rounds.resize(1);
    if (drawn.rounds[0].sent == drawn.rounds[0].expected) continue;
    World world({.seed = seed});
    VirtualGroup group(
        world,
        {.ranks = 3, .blocks = drawn.blocks, .bankBytes = drawn.bankBytes, .ofGraphs = true});
    SplitProgram program(world, group, drawn);
    group.start();
    const Report report = world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    for (int rank = 0; rank < 3; ++rank)
      EXPECT_EQ(Failure(group.host(rank).failed), Failure::kSplits);
    return;
  }
  FAIL() << "no seed has a misfit";
}

// The host asks for a call's misfit once it has seen the call's end. The thread sanitizer finds a race
// if one may be seen without the other.
TEST(AllToAll, AHostThatSeesTheEndSeesTheMisfit) {
  const unsigned races = racesReported();
  SplitCase drawn(1, 2, false);
  drawn.rounds.resize(1);
  drawn.rounds[0] = {.isShared = false, .sent = {{1, 2}, {3, 4}}, .expected = {{1, 3}, {2, 4}}};
  World world({.seed = 1});
  VirtualGroup group(world, {.blocks = drawn.blocks, .bankBytes = drawn.bankBytes});
  SplitProgram program(world, group, drawn);
  Misfit seen[2] = {};
  for (int rank = 0; rank < 2; ++rank) {
    HostWords& host = group.host(rank);
    world.host(rank, "caller", [&host, &misfit = seen[rank]] {
      while (loadAcquireSystem(&host.calls) == 0) relax();
      if (host.misfitCount == 1) misfit = host.misfits[0];
    });
  }
  group.start();
  const Report report = world.run();
  ASSERT_TRUE(report.ok) << report.problem;
  for (const Misfit& misfit : seen) EXPECT_EQ(misfit.call, 1u);
  EXPECT_EQ(racesReported(), races);
}

// Misfits that the host does not take: the ring is full, and nothing in it is overwritten.
TEST(AllToAll, TooManyMisfitsFailTheGroup) {
  SplitCase drawn(1, 2, false);
  drawn.rounds.assign(kMostMisfits + 3, drawn.rounds[0]);
  for (auto& round : drawn.rounds) {
    round.isShared = false;
    round.sent = {{1, 2}, {3, 4}};
    round.expected = {{1, 3}, {2, 4}};
  }
  World world({.seed = 1});
  VirtualGroup group(world, {.blocks = drawn.blocks, .bankBytes = drawn.bankBytes});
  SplitProgram program(world, group, drawn);
  group.start();
  const Report report = world.run();
  ASSERT_TRUE(report.ok) << report.problem;
  for (int rank = 0; rank < 2; ++rank) {
    const HostWords& host = group.host(rank);
    EXPECT_EQ(Failure(host.failed), Failure::kSplits);
    ASSERT_EQ(host.misfitCount, kMostMisfits);
    EXPECT_EQ(host.misfits[0].call, 1u);
    ASSERT_EQ(host.misfits[0].count, 2u);
    EXPECT_EQ(host.misfits[0].pairs[1].expected, 2u);
  }
}

// Another rank's table is wrong in every way: nothing is read or written out of bounds. The address
// sanitizer checks reads; this test checks the outputs.
TEST(AllToAll, PlacesOfOtherRanksAreReadWithBounds) {
  for (uint64_t seed = 1; seed <= kSeeds / 2; ++seed) {
    World world({.seed = seed});
    constexpr size_t kBank = kTableBytes + 512, kBytes = 100;
    VirtualGroup group(world, {.bankBytes = kBank});
    std::vector<unsigned char> outputs[2], input(2 * kBytes, 1);
    for (int rank = 0; rank < 2; ++rank) {
      outputs[rank].assign(3 * kBytes, kBank % 251);
      AllToAllArguments arguments{};
      arguments.exchange.root = -1;
      const size_t sizes[] = {kBytes / 2, kBytes / 2};
      layOutSegments(arguments, sizes, 2, kBank);
      for (int peer = 0; peer < 2; ++peer) {
        arguments.exchange.inputs[peer] = input.data();
        arguments.from[peer] = kBytes / 2;
        arguments.outputs[peer] = outputs[rank].data() + kBytes + size_t(peer) * kBytes / 2;
      }
      group.call(
          rank, "call", arguments.exchange, [arguments, rank, &group, seed](const Exchange& made) {
            AllToAllArguments completed = arguments;
            completed.exchange = made;
            if (rank == 1) {  // it publishes other places than those of its data
              const uint64_t wrong[] = {~uint64_t(0), ~uint64_t(0) - 15, kBank - kTableBytes - 8,
                                        1u << 20};
              runExchange(
                  completed.exchange, 0,
                  [&](const Turn& turn, const Blocks& blocks) {
                    auto& table =
                        *reinterpret_cast<SplitTable*>(bankAt(group.state(1), 1, turn.serial));
                    if (turn.number == 0 && blocks.first == 0) {
                      writeTable(completed, turn);
                      __syncthreads();
                      if (threadIdx.x == 0) {
                        table.to[0].place = seed % 2 ? wrong[seed / 2 % 4] : 0;
                        table.to[0].step = seed % 2 ? 16 : wrong[seed / 2 % 4];
                        if (seed % 3 == 0) table.to[0] = {3 * kBytes / 2, 0, 160};
                        table.exchanges = 3;
                      }
                    }
                    signalAll(completed.exchange, turn, blocks, [](Pushes&, unsigned) {});
                  },
                  [&](const GroupState&, Turn& turn, unsigned) { turn.exchanges = 3; },
                  [](const Turn&) { return true; });
              return;
            }
            exchangeSegments(completed);
          });
    }
    group.start();
    const Report report = world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    for (size_t i = 0; i < kBytes; ++i) {
      ASSERT_EQ(outputs[0][i], kBank % 251);
      ASSERT_EQ(outputs[0][2 * kBytes + i], kBank % 251);
    }
  }
}

#ifdef MOONCAKE_SIMT_PLAIN_ACCESSES
// A rank reads the segments for it once over the wires between devices, and writes nothing there but
// its signals. Tables are all that comes on top.
TEST(AllToAll, MovesNoMoreBytesThanItMust) {
  constexpr int kRanks = 4;
  for (const size_t room : {size_t(1) << 16, size_t(8) << 10}) {
    SplitCase with(3, kRanks, false);
    with.blocks = 2;
    with.shift = with.gap = 0;
    with.bankBytes = room + kSplitBytes;
    with.rounds.resize(1);
    size_t sent[kRanks] = {}, received[kRanks] = {};
    with.rounds[0] = {false, {}, {}};
    for (int from = 0; from < kRanks; ++from) {
      auto& row = with.rounds[0].sent.emplace_back();
      for (int to = 0; to < kRanks; ++to) {
        row.push_back(size_t(4096 + 1024 * from + 2048 * to));
        sent[from] += row.back();
        if (from != to) received[to] += row.back();
      }
    }
    with.rounds[0].expected = with.rounds[0].sent;
    World world({.seed = 3});
    VirtualGroup group(world,
                       {.ranks = kRanks, .blocks = with.blocks, .bankBytes = with.bankBytes});
    SplitProgram program(world, group, with);
    group.start();
    const Report report = world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    program.check();
    for (int rank = 0; rank < kRanks; ++rank) {
      const simt::Traffic& traffic = world.traffic(rank);
      const size_t least = received[rank];
      EXPECT_GE(traffic.bytesReadThere, least);
      EXPECT_LE(traffic.bytesReadThere, least + least / 20);
      EXPECT_EQ(traffic.bytesWrittenThere, 0u);
      const size_t published = sent[rank], taken = with.rounds[0].sent[size_t(rank)][size_t(rank)];
      const size_t here = published + taken, written = published + least + taken;
      EXPECT_LE(traffic.bytesReadHere, here + here / 20);
      EXPECT_LE(traffic.bytesWrittenHere, written + written / 20);
    }
  }
}
#endif

}  // namespace
}  // namespace mooncake::kernels
