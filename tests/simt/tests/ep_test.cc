#include <cstdlib>
#include <gtest/gtest.h>
#include <iterator>
#include <string>
#include <vector>

#include "ep_program.h"
#include "races.h"
#include "virtual_group.h"

namespace mooncake::kernels {
namespace {

using simt::kFindsRaces;
using simt::racesReported;
using simt::Report;
using simt::World;

constexpr uint64_t kSeeds = kFindsRaces ? 3 : 20;

uint64_t seedsOf(uint64_t usual) {
  const char* const factor = std::getenv("MOONCAKE_SIMT_SEEDS");
  return factor ? usual * uint64_t(std::atoi(factor)) : usual;
}

GroupShape shapeOf(const EpPlan& plan, bool ofGraphs = false, const std::vector<int>& hosts = {}) {
  return {.ranks = plan.shape.ranks,
          .blocks = plan.blocks,
          .threads = plan.threads,
          .banks = 2,
          .bankBytes = plan.bankBytes(),
          .ofGraphs = ofGraphs,
          .hostOf = hosts,
          .inboxBankBytes = plan.bankBytes(/*ofInbox=*/true)};
}

struct Swept {
  unsigned wentOn = 0, took = 0;  // decisions of hosts
  unsigned missing = 0, lostBetween = 0, skipped = 0;
};

// Draws programs by seeds and checks each. `disturb` may kill and stop ranks.
template <typename Disturb>
void sweep(int ranks, uint64_t seeds, Disturb disturb, Swept* swept = nullptr,
           bool ofGraphs = false, const std::vector<int>& hosts = {}, uint64_t skipNs = 0) {
  const unsigned races = racesReported();
  for (uint64_t seed = 1; seed <= seedsOf(seeds); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    World world({.seed = seed, .starveFor = seed % 3 ? 16u : 0u});
    EpPlan plan(seed, ranks);
    if (skipNs) plan.drawLates();
    GroupShape shape = shapeOf(plan, ofGraphs, hosts);
    shape.seed = seed;
    shape.callsEach = unsigned(seed % 4);
    shape.skipNs = skipNs;
    shape.ended = seed % 2 ? 0 : (uint64_t(1) << 32) - 2;
    VirtualGroup group(world, shape);
    EpProgram program(world, group, plan);
    disturb(world, group, plan);
    group.start();
    const Report report = world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    program.check();
    group.checkPushes();
    group.checkChanges();
    if (::testing::Test::HasFailure()) return;
    if (swept) {
      swept->wentOn += group.decided(Decision::kGoOn);
      swept->took += group.decided(Decision::kTake);
      swept->missing += program.missing();
      swept->lostBetween += program.lostBetween();
      swept->skipped += program.skipped();
    }
    ASSERT_EQ(racesReported(), races);
  }
}

constexpr auto kNothing = [](World&, VirtualGroup&, EpPlan&) {};

TEST(Ep, OneRank) { sweep(1, kSeeds, kNothing); }
TEST(Ep, TwoRanks) { sweep(2, kSeeds, kNothing); }
TEST(Ep, FourRanks) { sweep(4, kSeeds, kNothing); }
TEST(Ep, SevenRanks) { sweep(7, kSeeds / 2, kNothing); }

// Blocks and peers decide how often a rank accesses atomic words in an operation.
constexpr auto kKillOne = [](World&, VirtualGroup& group, EpPlan& plan) {
  const auto ranks = unsigned(plan.shape.ranks);
  group.kill(int(plan.draw(ranks)), 1 + plan.draw(60 * ranks));
};

TEST(Ep, GoOnWithoutAKilledRank) {
  Swept swept;
  for (int ranks = 2; ranks <= 4; ++ranks) sweep(ranks, 4 * kSeeds, kKillOne, &swept);
  EXPECT_GT(swept.wentOn, 0u);
  EXPECT_GT(swept.missing, 0u);
  if (kFindsRaces) return;  // it runs few seeds
  EXPECT_GT(swept.took, 0u);
  EXPECT_GT(swept.lostBetween, 0u);
}

constexpr auto kKillTwo = [](World&, VirtualGroup& group, EpPlan& plan) {
  const auto ranks = unsigned(plan.shape.ranks), first = plan.draw(ranks);
  group.kill(int(first), 1 + plan.draw(200));
  group.kill(int((first + 1 + plan.draw(ranks - 1)) % ranks), 1 + plan.draw(400));
};

TEST(Ep, GoOnWithoutTwoKilledRanks) { sweep(5, kSeeds, kKillTwo); }

// Longer than the kernels' patience: one block waits on, and the others end.
constexpr uint64_t kLateNs = 50'000'000;

TEST(Ep, WaitForALateRank) {
  sweep(3, 2 * kSeeds, [](World& world, VirtualGroup&, EpPlan& plan) {
    world.stop(int(plan.draw(3)), 1 + plan.draw(120), kLateNs);
  });
}

constexpr auto kKillOneAndStopOne = [](World& world, VirtualGroup& group, EpPlan& plan) {
  const auto ranks = unsigned(plan.shape.ranks), killed = plan.draw(ranks);
  group.kill(int(killed), 1 + plan.draw(60 * ranks));
  world.stop(int((killed + 1) % ranks), 1 + plan.draw(60 * ranks), kLateNs);
};

TEST(Ep, ALateRankAndAKilledOne) { sweep(4, 2 * kSeeds, kKillOneAndStopOne); }

// The others take a rank for dead that has stopped in the middle of an operation, and overwrite what it
// still reads. It has the right results, or an error.
TEST(Ep, ARankThatIsOutHasNoTornResult) {
  if (kFindsRaces) GTEST_SKIP() << "its reads race";
  for (unsigned ranks = 2; ranks <= 4; ++ranks) {
    sweep(int(ranks), 3 * kSeeds, [&](World& world, VirtualGroup& group, EpPlan& plan) {
      const int out = int(plan.draw(ranks));
      world.stop(out, 1 + plan.draw(40 * ranks), kLateNs);
      group.evict(out, plan.draw(10));
    });
  }
}

TEST(Ep, Replays) { sweep(3, kSeeds, kNothing, nullptr, /*ofGraphs=*/true); }

// Hosts stop the kernels from another stream than that of the replays: also between two kernels of
// an operation.
TEST(Ep, ReplaysGoOnWithoutKilledRanks) {
  Swept swept;
  sweep(2, 2 * kSeeds, kKillOne, &swept, /*ofGraphs=*/true);
  sweep(3, 2 * kSeeds, kKillOneAndStopOne, &swept, /*ofGraphs=*/true);
  sweep(5, kSeeds, kKillTwo, &swept, /*ofGraphs=*/true);
  EXPECT_GT(swept.wentOn, 0u);
  if (!kFindsRaces) EXPECT_GT(swept.took, 0u);  // it runs few seeds
}

constexpr uint64_t kSkipNs = 5'000'000;

TEST(Ep, SkipLateRanks) {
  Swept swept;
  for (int ranks = 2; ranks <= 5; ++ranks)
    sweep(ranks, kSeeds, kNothing, &swept, ranks % 2, {}, kSkipNs);
  EXPECT_GT(swept.skipped, 0u);
  EXPECT_GT(swept.missing, 0u);
}

TEST(Ep, SkipLateRanksWithoutKilledOnes) {
  Swept swept;
  sweep(3, kSeeds, kKillOne, &swept, false, {}, kSkipNs);
  sweep(4, kSeeds, kKillOneAndStopOne, &swept, true, {}, kSkipNs);
  sweep(5, kSeeds, kKillTwo, &swept, false, {}, kSkipNs);
  EXPECT_GT(swept.skipped, 0u);
  EXPECT_GT(swept.wentOn, 0u);
}

// Ranks die in an operation that they do without a late one, which may have passed it meanwhile.
constexpr auto kLoseAfterSkip = [](World&, VirtualGroup& group, EpPlan& plan) {
  group.loseAfterSkip(plan.random());
};

TEST(Ep, LoseRanksThatHaveSkippedOthers) {
  Swept swept;
  for (int ranks = 2; ranks <= 5; ++ranks)
    sweep(ranks, 2 * kSeeds, kLoseAfterSkip, &swept, ranks % 2, {}, kSkipNs);
  EXPECT_GT(swept.skipped, 0u);
  EXPECT_GT(swept.wentOn, 0u);
}

const std::vector<int> kSplits[] = {{0, 1},    {0, 0, 1},    {0, 1, 1},
                                    {0, 1, 2}, {0, 0, 0, 1}, {0, 1, 0, 1}};

TEST(EpHosts, Ranks) {
  for (const auto& hosts : kSplits)
    sweep(int(hosts.size()), (kSeeds + 1) / 2, kNothing, nullptr, false, hosts);
}

void disturbSplits(bool ofGraphs) {
  Swept swept;
  for (const auto& hosts : kSplits) {
    const auto disturb = [&](World& world, VirtualGroup& group, EpPlan& plan) {
      const auto ranks = unsigned(plan.shape.ranks), first = plan.draw(ranks);
      const unsigned most = 300 * ranks, kills = plan.draw(ranks > 2 ? 3 : 2);
      if (kills > 0) group.kill(int(first), 1 + plan.draw(most));
      if (kills > 1) group.kill(int((first + 1) % ranks), 1 + plan.draw(2 * most));
      if (kills == 0 || (!ofGraphs && plan.draw(2)))
        world.stop(int((first + 2) % ranks), 1 + plan.draw(most),
                   plan.draw(2) ? kLateNs : 2'000'000);
    };
    const uint64_t seeds = kFindsRaces ? kSeeds : ofGraphs ? kSeeds / 5 : 2 * kSeeds;
    sweep(int(hosts.size()), seeds, disturb, &swept, ofGraphs, hosts);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(swept.wentOn, 0u);
  EXPECT_GT(swept.missing, 0u);
  if (!kFindsRaces && !ofGraphs) EXPECT_GT(swept.took, 0u);  // they run few seeds
}
TEST(EpHosts, SkipLateRanks) {
  Swept swept;
  for (const auto& hosts : kSplits)
    sweep(int(hosts.size()), (kSeeds + 1) / 2, kKillOne, &swept, false, hosts, kSkipNs);
  EXPECT_GT(swept.skipped, 0u);
}
TEST(EpHosts, LoseRanksThatHaveSkippedOthers) {
  // The data of those that die may still be under way.
  const auto disturb = [](World& world, VirtualGroup& group, EpPlan& plan) {
    const auto ranks = unsigned(plan.shape.ranks);
    for (unsigned rank = 0; rank < ranks; ++rank)
      for (unsigned peer = 0; peer < ranks; ++peer)
        if (plan.draw(2))
          group.proxy(int(rank)).delay(int(peer), plan.draw(12), kSkipNs * (1 + plan.draw(8)));
    kLoseAfterSkip(world, group, plan);
  };
  Swept swept;
  for (const auto& hosts : kSplits)
    sweep(int(hosts.size()), kSeeds, disturb, &swept, false, hosts, kSkipNs);
  EXPECT_GT(swept.skipped, 0u);
}
TEST(EpHosts, GoOnWithoutKilledRanks) { disturbSplits(false); }
TEST(EpHosts, ReplaysGoOnWithoutKilledRanks) { disturbSplits(true); }

// Two rounds of three ranks. Each rank owns an expert, and has a token at least.
EpPlan planOfThree(uint64_t seed) {
  EpPlan plan(seed, 3);
  while (plan.rounds.size() != 2) plan = EpPlan(seed += 1000, 3);
  plan.shape.owners = {0, 1, 2};
  plan.shape.maxTokens = 4;
  for (EpRound& round : plan.rounds) {
    for (EpInputs& inputs : round.of) {
      inputs = {.tokens = 1 + plan.draw(4), .topk = 2, .areWide = inputs.areWide};
      for (unsigned token = 0; token < inputs.tokens; ++token) {
        const unsigned first = plan.draw(3);
        for (const unsigned expert : {first, (first + 1) % 3}) inputs.chosen.push_back(expert);
      }
      inputs.wanted = inputs.chosen;
      inputs.weights.assign(inputs.chosen.size(), 0.5f);
    }
  }
  return plan;
}

// `spoil(rank's inputs, round)` makes the inputs of a rank wrong. All ranks must tell their hosts
// the same failure of that rank, and keep `ended` operations.
template <typename Spoil>
void failAll(Failure failure, uint64_t ended, Spoil spoil) {
  for (uint64_t seed = 1; seed <= (kSeeds + 1) / 2; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    EpPlan plan = planOfThree(seed);
    const int wrong = int(seed % 3);
    spoil(plan.rounds[0].of[size_t(wrong)], plan.rounds[1].of[size_t(wrong)], seed);
    World world({.seed = seed});
    VirtualGroup group(world, shapeOf(plan, /*ofGraphs=*/seed % 2));
    EpProgram program(world, group, plan);
    group.start();
    const Report report = world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    for (int rank = 0; rank < 3; ++rank) {
      const HostWords& host = group.host(rank);
      ASSERT_EQ(Failure(host.failed), failure);
      // To a rank with another handle than the others, the handle of the first of them is wrong.
      const bool isWrongToo = failure == Failure::kOtherDispatch && rank == wrong;
      ASSERT_EQ(host.failedRank, uint32_t(!isWrongToo ? wrong : wrong == 0 ? 1 : 0));
      ASSERT_EQ(host.done, ended);
      ASSERT_EQ(group.state(rank).entered, 0u);
    }
  }
}

TEST(Ep, AnExpertThatDoesNotExist) {
  failAll(Failure::kNoSuchExpert, 2, [](EpInputs&, EpInputs& inputs, uint64_t seed) {
    constexpr int64_t kWrong[] = {3, -2, INT32_MAX, INT32_MIN, int64_t(1) << 32, INT64_MIN};
    const int64_t expert = kWrong[seed % std::size(kWrong)];
    inputs.areWide = inputs.areWide || int32_t(expert) != expert;
    inputs.chosen.back() = expert;
  });
}

TEST(Ep, TooManyRowsOfARankForAnExpert) {
  failAll(Failure::kTooManyRows, 0, [](EpInputs& inputs, EpInputs&, uint64_t seed) {
    inputs.tokens = 3;
    inputs.chosen = {0, 0, 1, 1, 2, 2};
    for (size_t i = 0; i < 5; ++i) inputs.chosen[i] = int64_t(seed % 3);
    inputs.wanted = inputs.chosen;
    inputs.weights.assign(6, 1);
  });
}

TEST(Ep, ACombineOfAnotherExpert) {
  failAll(Failure::kOtherExpert, 1, [](EpInputs& inputs, EpInputs&, uint64_t seed) {
    inputs.wanted.back() = (inputs.chosen.back() + 1) % 3;
    if (seed % 2) inputs.chosen.back() = kNone;
  });
}

TEST(Ep, ACombineOfAnotherDispatch) {
  failAll(Failure::kOtherDispatch, 3,
          [](EpInputs&, EpInputs& inputs, uint64_t) { inputs.handleOf = 1; });
}

// The other ranks wait for a rank's first signal, and tell for how long.
TEST(Ep, WaitsAreMeasured) {
  for (uint64_t seed = 1; seed <= (kSeeds + 1) / 2; ++seed) {
    EpPlan plan = planOfThree(seed);
    plan.measures = true;
    World world({.seed = seed});
    VirtualGroup group(world, shapeOf(plan));
    EpProgram program(world, group, plan);
    const bool isLate = seed % 2;
    if (isLate) world.stop(1, 1, kLateNs);
    group.start();
    const Report report = world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    program.check();
    constexpr int64_t kLate = kLateNs / 1000;
    for (const int rank : {0, 2}) {
      EXPECT_EQ(program.waited(rank, 1) >= kLate - 20'000, isLate);
      EXPECT_LT(program.waited(rank, 1), 2 * kLate);
      EXPECT_LT(program.waited(rank, 2 - rank), kLate - 20'000);
    }
  }
}

#ifdef MOONCAKE_SIMT_PLAIN_ACCESSES
// Bytes that a rank must read of the others' devices: the rows of its experts, or for its tokens,
// and where these are.
struct Crossing {
  uint64_t dispatch = 0, combine = 0;
};
Crossing crossing(const EpPlan& plan, const EpRound& round, const RowPool& pool, int rank) {
  const EpShape& shape = plan.shape;
  Crossing bytes;
  for (int peer = 0; peer < shape.ranks; ++peer) {
    const EpInputs& theirs = round.of[size_t(peer)];
    if (peer != rank) {
      bytes.dispatch += sizeof(RowsHeader) + theirs.chosen.size() * sizeof(Choice);
      bytes.combine += sizeof(RowsHeader);
    }
    for (const int64_t expert : theirs.chosen) {
      const int owner = expert < 0 ? peer : shape.owners[size_t(expert)];
      const uint64_t row = round.kind == RowKind::kBf16
                               ? 2 * shape.hidden
                               : shape.hidden + scalesOf(shape.hidden) * sizeof(float);
      if (owner == rank && peer != rank) bytes.dispatch += row;
    }
  }
  for (int32_t expert = 0; expert < int32_t(shape.owners.size()); ++expert) {
    const std::vector<Route> routes = routesTo(shape, round, expert, ~uint64_t(0));
    for (size_t row = 0; row < routes.size(); ++row) {
      if (routes[row].source != rank || shape.owners[size_t(expert)] == rank) continue;
      bytes.combine +=
          sizeof(uint32_t) +
          (round.usesLogfmt ? pool.logfmtReads(round.answerRow(expert, row)) : 2 * shape.hidden);
    }
  }
  return bytes;
}

// Each row crosses once for each choice of an expert, in its short form, and a rank writes nothing
// to others but its signals: one for each block and peer.
TEST(Ep, MoveNoMoreBytesThanTheyMust) {
  constexpr int kRanks = 4;
  for (const RowKind kind : {RowKind::kBf16, RowKind::kFp8}) {
    EpPlan plan = planOfThree(1);
    plan.blocks = 2;
    plan.threads = 64;
    plan.measures = false;
    plan.shape = {.ranks = kRanks, .hidden = 4096, .maxTokens = 16, .owners = {0, 0, 1, 2, 3, 3}};
    EpRound round{.kind = kind, .usesLogfmt = kind == RowKind::kFp8, .of = {}};
    for (int rank = 0; rank < kRanks; ++rank) {
      EpInputs inputs{.tokens = 12, .topk = 4};
      for (unsigned i = 0; i < inputs.tokens; ++i)
        for (unsigned k = 0; k < 4; ++k) inputs.chosen.push_back((i + k + unsigned(rank)) % 6);
      inputs.wanted = inputs.chosen;
      inputs.weights.assign(inputs.chosen.size(), 0.25f);
      round.of.push_back(std::move(inputs));
    }
    plan.rounds = {round};
    std::vector<uint64_t> before(kRanks);  // bytes of the dispatch
    for (const bool combines : {false, true}) {
      plan.combines = combines;
      World world({.seed = 3});
      VirtualGroup group(world, shapeOf(plan));
      EpProgram program(world, group, plan);
      group.start();
      const Report report = world.run();
      ASSERT_TRUE(report.ok) << report.problem;
      program.check();
      for (int rank = 0; rank < kRanks; ++rank) {
        const simt::Traffic& traffic = world.traffic(rank);
        const Crossing due = crossing(plan, round, program.pool(), rank);
        const auto must = double(combines ? due.combine : due.dispatch);
        const auto read = double(traffic.bytesReadThere - before[size_t(rank)]);
        EXPECT_GE(read, must);
        EXPECT_LE(read, 1.05 * must);
        before[size_t(rank)] = traffic.bytesReadThere;
        EXPECT_EQ(traffic.bytesWrittenThere, 0u);
        EXPECT_EQ(traffic.remoteStores, (combines ? 2 : 1) * plan.blocks * (kRanks - 1));
      }
    }
  }
}
#endif

}  // namespace
}  // namespace mooncake::kernels
