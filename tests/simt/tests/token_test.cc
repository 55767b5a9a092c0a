#include <cstdlib>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "races.h"
#include "token_program.h"
#include "token_reference.h"
#include "virtual_group.h"

namespace mooncake::kernels {
namespace {

using simt::kFindsRaces;
using simt::racesReported;
using simt::Report;
using simt::World;

constexpr uint64_t kSeeds = kFindsRaces ? 4 : 30;

uint64_t seedsOf(uint64_t usual) {
  const char* const factor = std::getenv("MOONCAKE_SIMT_SEEDS");
  return factor ? usual * uint64_t(std::atoi(factor)) : usual;
}

GroupShape shapeOf(const TokenPlan& plan, bool ofGraphs = false,
                   const std::vector<int>& hosts = {}) {
  return {.ranks = plan.ranks,
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
  unsigned missing = 0, gone = 0;
};

// Draws programs by seeds and checks each. `disturb` may kill and stop ranks.
template <typename Disturb>
void sweep(int ranks, uint64_t seeds, Disturb disturb, Swept* swept = nullptr,
           bool ofGraphs = false, const std::vector<int>& hosts = {}) {
  const unsigned races = racesReported();
  for (uint64_t seed = 1; seed <= seedsOf(seeds); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed) + " of " + std::to_string(ranks) + " ranks");
    World world({.seed = seed, .starveFor = seed % 3 ? 16u : 0u});
    TokenPlan plan(seed, ranks);
    GroupShape shape = shapeOf(plan, ofGraphs, hosts);
    shape.seed = seed;
    shape.ended = seed % 2 ? 0 : (uint64_t(1) << 32) - 2;
    VirtualGroup group(world, shape);
    TokenProgram program(world, group, plan);
    disturb(world, group, plan);
    group.start();
    const Report report = world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    program.check();
    group.checkPushes();
    group.checkChanges();
    if (::testing::Test::HasFatalFailure()) return;
    if (swept) {
      swept->wentOn += group.decided(Decision::kGoOn);
      swept->took += group.decided(Decision::kTake);
      swept->missing += program.missing();
      swept->gone += program.gone();
    }
    ASSERT_EQ(racesReported(), races);
  }
}

constexpr auto kNothing = [](World&, VirtualGroup&, TokenPlan&) {};

TEST(Tokens, OneRank) { sweep(1, kSeeds, kNothing); }
TEST(Tokens, TwoRanks) { sweep(2, kSeeds, kNothing); }
TEST(Tokens, ThreeRanks) { sweep(3, kSeeds, kNothing); }
TEST(Tokens, FiveRanks) { sweep(5, kSeeds, kNothing); }
TEST(Tokens, SevenRanks) { sweep(7, kSeeds, kNothing); }

// Blocks, peers and pieces decide how often a rank accesses atomic words in an operation.
constexpr auto kKillOne = [](World&, VirtualGroup& group, TokenPlan& plan) {
  const auto ranks = unsigned(plan.ranks);
  group.kill(int(plan.draw(ranks)), 1 + plan.draw(60 * ranks));
};

TEST(Tokens, GoOnWithoutAKilledRank) {
  Swept swept;
  for (int ranks = 2; ranks <= 4; ++ranks) sweep(ranks, 2 * kSeeds, kKillOne, &swept);
  EXPECT_GT(swept.wentOn, 0u);
  EXPECT_GT(swept.missing, 0u);
  EXPECT_GT(swept.gone, 0u);
  if (!kFindsRaces) EXPECT_GT(swept.took, 0u);  // it runs few seeds
}

constexpr auto kKillTwo = [](World&, VirtualGroup& group, TokenPlan& plan) {
  const auto ranks = unsigned(plan.ranks), first = plan.draw(ranks);
  group.kill(int(first), 1 + plan.draw(200));
  group.kill(int((first + 1 + plan.draw(ranks - 1)) % ranks), 1 + plan.draw(400));
};

TEST(Tokens, GoOnWithoutTwoKilledRanks) { sweep(5, 2 * kSeeds, kKillTwo); }

// Longer than the kernels' patience: one block waits on, and the others end.
constexpr uint64_t kLateNs = 50'000'000;

TEST(Tokens, WaitForALateRank) {
  sweep(3, 2 * kSeeds, [](World& world, VirtualGroup&, TokenPlan& plan) {
    world.stop(int(plan.draw(3)), 1 + plan.draw(120), kLateNs);
  });
}

constexpr auto kKillOneAndStopOne = [](World& world, VirtualGroup& group, TokenPlan& plan) {
  const auto ranks = unsigned(plan.ranks), killed = plan.draw(ranks);
  group.kill(int(killed), 1 + plan.draw(60 * ranks));
  world.stop(int((killed + 1) % ranks), 1 + plan.draw(60 * ranks), kLateNs);
};

TEST(Tokens, ALateRankAndAKilledOne) { sweep(4, 2 * kSeeds, kKillOneAndStopOne); }

// The others take a rank for dead that has stopped in the middle of an operation, and overwrite what it
// still reads. It has the right results, or an error.
TEST(Tokens, ARankThatIsOutHasNoTornResult) {
  if (kFindsRaces) GTEST_SKIP() << "its reads race";
  for (unsigned ranks = 2; ranks <= 4; ++ranks) {
    sweep(int(ranks), 2 * kSeeds, [&](World& world, VirtualGroup& group, TokenPlan& plan) {
      const int out = int(plan.draw(ranks));
      world.stop(out, 1 + plan.draw(40 * ranks), kLateNs);
      group.evict(out, plan.draw(10));
    });
  }
}

TEST(Tokens, Replays) { sweep(3, kSeeds, kNothing, nullptr, /*ofGraphs=*/true); }

// Hosts stop the kernels from another stream than that of the replays.
TEST(Tokens, ReplaysGoOnWithoutKilledRanks) {
  Swept swept;
  sweep(2, 2 * kSeeds, kKillOne, &swept, /*ofGraphs=*/true);
  sweep(3, 2 * kSeeds, kKillOneAndStopOne, &swept, /*ofGraphs=*/true);
  sweep(5, kSeeds, kKillTwo, &swept, /*ofGraphs=*/true);
  EXPECT_GT(swept.wentOn, 0u);
  if (!kFindsRaces) EXPECT_GT(swept.took, 0u);  // it runs few seeds
}

const std::vector<int> kSplits[] = {{0, 1},    {0, 0, 1},    {0, 1, 1},
                                    {0, 1, 2}, {0, 0, 0, 1}, {0, 1, 0, 1}};

TEST(TokenHosts, Ranks) {
  for (const auto& hosts : kSplits)
    sweep(int(hosts.size()), (kSeeds + 1) / 2, kNothing, nullptr, false, hosts);
}

void disturbSplits(bool ofGraphs) {
  Swept swept;
  for (const auto& hosts : kSplits) {
    const auto disturb = [&](World& world, VirtualGroup& group, TokenPlan& plan) {
      const auto ranks = unsigned(plan.ranks), first = plan.draw(ranks);
      const unsigned most = 300 * ranks, kills = plan.draw(ranks > 2 ? 3 : 2);
      if (kills > 0) group.kill(int(first), 1 + plan.draw(most));
      if (kills > 1) group.kill(int((first + 1) % ranks), 1 + plan.draw(2 * most));
      if (kills == 0 || (!ofGraphs && plan.draw(2)))
        world.stop(int((first + 2) % ranks), 1 + plan.draw(most),
                   plan.draw(2) ? kLateNs : 2'000'000);
    };
    const uint64_t seeds = ofGraphs && !kFindsRaces ? 2 * kSeeds / 5 : kSeeds;
    sweep(int(hosts.size()), seeds, disturb, &swept, ofGraphs, hosts);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(swept.wentOn, 0u);
  EXPECT_GT(swept.missing, 0u);
  if (kFindsRaces) return;  // it runs few seeds
  EXPECT_GT(swept.gone, 0u);
  if (!ofGraphs) EXPECT_GT(swept.took, 0u);  // likewise
}
TEST(TokenHosts, GoOnWithoutKilledRanks) { disturbSplits(false); }
TEST(TokenHosts, ReplaysGoOnWithoutKilledRanks) { disturbSplits(true); }

// Operations of three ranks, where each token has two of them. Nobody is masked.
TokenPlan planOfThree(uint64_t seed, std::vector<TokenRound> rounds, unsigned tokens = 6) {
  TokenPlan plan(seed, 3);
  for (size_t number = 0; number < rounds.size(); ++number) {
    TokenRound& round = rounds[number];
    round.number = number;
    round.masks.assign(3, {});
    round.pieces = 1 + plan.draw(3);
    round.step = (tokens + round.pieces - 1) / round.pieces;
    if (round.verb != TokenVerb::kCombine) round.fields = {plan.draw(2) ? 14u : 256u, 5};
    if (round.verb == TokenVerb::kAgain) round.capacity = rounds[round.handle].capacity;
    if (round.verb != TokenVerb::kDispatch) continue;
    round.handle = number;
    round.width = 2;
    round.of.assign(3, {.tokens = tokens});
    for (TokenInputs& inputs : round.of) {
      for (unsigned token = 0; token < inputs.tokens; ++token) {
        const unsigned first = plan.draw(3);
        for (const unsigned rank : {first, (first + 1) % 3}) inputs.ranks.push_back(int32_t(rank));
      }
    }
    for (int rank = 0; rank < 3; ++rank)
      round.capacity.push_back(round.rowsFor(0, rank) + round.rowsFor(1, rank) +
                               round.rowsFor(2, rank));
  }
  plan.rounds = std::move(rounds);
  return plan;
}

// All ranks must tell their hosts the same failure of a rank, and keep `ended` operations.
void failAll(const TokenPlan& plan, GroupShape shape, uint64_t seed, Failure failure, int wrong,
             uint64_t ended) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  World world({.seed = seed});
  VirtualGroup group(world, shape);
  TokenProgram program(world, group, plan);
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

TEST(Tokens, ADispatchOfMoreRowsThanARankTakes) {
  for (uint64_t seed = 1; seed <= (kSeeds + 1) / 2; ++seed) {
    TokenPlan plan = planOfThree(seed, {{}, {}, {}});
    const auto wrong = size_t(seed % 3);
    --plan.rounds[1].capacity[wrong];
    failAll(plan, shapeOf(plan, /*ofGraphs=*/seed % 2), seed, Failure::kNoPlace, int(wrong), 1);
  }
}

// One rank has all rows, and one more than it has memory for: in the only piece, the first,
// or the last one.
TEST(Tokens, ACombineOfMoreRowsThanFit) {
  for (uint64_t seed = 1; seed <= (kSeeds + 1) / 2; ++seed) {
    TokenPlan plan = planOfThree(seed, {{}, {.verb = TokenVerb::kCombine}});
    plan.hidden = 300;
    const auto wrong = size_t(seed % 3);
    TokenRound& dispatch = plan.rounds[0];
    TokenRound& combine = plan.rounds[1];
    combine.pieces = 1 + unsigned(seed / 3 % 2);
    combine.step = 6 / combine.pieces;
    dispatch.fields = {1};
    for (TokenInputs& inputs : dispatch.of) {
      inputs.ranks.assign(12, kNone);
      for (size_t token = 0; token < 3; ++token)
        inputs.ranks[2 * (token + (seed % 2 ? 3 : 0))] = int32_t(wrong);
    }
    dispatch.capacity.assign(3, 0);
    dispatch.capacity[wrong] = 9;
    GroupShape shape = shapeOf(plan, /*ofGraphs=*/seed % 2);
    shape.bankBytes = plan.bankBytes(combine) - answerRowBytes(plan.hidden, 0);
    ASSERT_GE(shape.bankBytes, plan.bankBytes(dispatch));
    failAll(plan, shape, seed, Failure::kNoPlace, int(wrong), 1);
  }
}

// An inbox has no room for the rows that go back to a rank of another host.
TEST(TokenHosts, ACombineOfMoreRowsThanAnInboxHas) {
  for (uint64_t seed = 1; seed <= (kSeeds + 1) / 2; ++seed) {
    TokenPlan plan = planOfThree(seed, {{}, {.verb = TokenVerb::kCombine}});
    plan.hidden = 300;
    const auto wrong = size_t(seed % 3);
    plan.rounds[0].fields = {1};
    for (TokenInputs& inputs : plan.rounds[0].of) {
      inputs.ranks.assign(12, kNone);
      for (size_t token = 0; token < 3; ++token) inputs.ranks[2 * token] = int32_t(wrong);
    }
    plan.rounds[0].capacity.assign(3, 0);
    plan.rounds[0].capacity[wrong] = 9;
    plan.rounds[1].pieces = 1 + unsigned(seed / 3 % 2);
    plan.rounds[1].step = 6 / plan.rounds[1].pieces;
    GroupShape shape = shapeOf(plan, /*ofGraphs=*/seed % 2, {0, 1, 2});
    shape.seed = seed;
    shape.inboxBankBytes = answerRowsAt() + 2 * answerRowBytes(plan.hidden, 0);
    failAll(plan, shape, seed, Failure::kNoPlace, int(wrong), 1);
  }
}

// A row crosses to a host once in a dispatch, however many of its ranks want it.
TEST(TokenHosts, PushNoMoreBytesThanTheyMust) {
  const std::vector<int> hosts{0, 1, 1};
  TokenPlan plan = planOfThree(1, {{}, {.verb = TokenVerb::kAgain}, {.verb = TokenVerb::kCombine}});
  World world({.seed = 3});
  GroupShape shape = shapeOf(plan, /*ofGraphs=*/false, hosts);
  VirtualGroup group(world, shape);
  TokenProgram program(world, group, plan);
  group.start();
  const Report report = world.run();
  ASSERT_TRUE(report.ok) << report.problem;
  program.check();
  for (int rank = 0; rank < 3; ++rank) {
    size_t due = 0, data = 0;
    for (int peer = 0; peer < 3; ++peer)
      if (hosts[size_t(peer)] != hosts[size_t(rank)]) data += group.pushed(rank, peer).data;
    const auto isThere = [&](int32_t peer) {
      return peer != kNone && hosts[size_t(peer)] != hosts[size_t(rank)];
    };
    for (const TokenRound& round : plan.rounds) {
      const TokenRound& dispatch = plan.dispatchOf(round);
      if (round.verb == TokenVerb::kCombine) {
        for (int peer = 0; peer < 3; ++peer) {
          if (!isThere(peer)) continue;
          due += round.pieces * answerRowsAt();
          due += dispatch.rowsFor(peer, rank) * answerRowBytes(plan.hidden, round.weightCount);
        }
        continue;
      }
      const std::vector<int32_t>& ranks = dispatch.of[size_t(rank)].ranks;
      due += round.pieces * tokenChoicesAt() + ranks.size() * sizeof(Choice);
      for (size_t token = 0; token < ranks.size() / 2; ++token)
        due += (isThere(ranks[2 * token]) || isThere(ranks[2 * token + 1])) * tokenBytes(round);
    }
    EXPECT_EQ(data, due) << "rank " << rank;
  }
}

// The calls of one rank have another dispatch's handle.
TEST(Tokens, RowsOfAnotherDispatch) {
  for (uint64_t seed = 1; seed <= (kSeeds + 1) / 2; ++seed) {
    for (const TokenVerb verb : {TokenVerb::kAgain, TokenVerb::kCombine}) {
      TokenPlan plan = planOfThree(seed, {{}, {}, {.verb = verb, .handle = 1}});
      const int wrong = int(seed % 3);
      plan.rounds[2].otherHandle = {wrong, 0};
      GroupShape shape = shapeOf(plan, /*ofGraphs=*/seed % 2);
      shape.bankBytes *= 2;  // the other dispatch may have more rows in a piece
      failAll(plan, shape, seed, Failure::kOtherDispatch, wrong, 2);
    }
  }
}

#ifdef MOONCAKE_SIMT_PLAIN_ACCESSES
// Bytes that a rank must read of the others' devices in an operation: the rows for it once, and
// where these are. The facts of a rank are read in each piece.
size_t mustRead(const TokenPlan& plan, const TokenRound& round, int rank) {
  size_t bytes = 0;
  const TokenRound& dispatch = plan.dispatchOf(round);
  for (int peer = 0; peer < plan.ranks; ++peer) {
    if (peer == rank) continue;
    bytes += round.pieces * sizeof(RowsHeader);
    if (round.verb == TokenVerb::kCombine) {
      const size_t row = 2 * plan.hidden + round.weightCount * sizeof(float);
      bytes += dispatch.rowsFor(rank, peer) * row;
    } else {
      size_t row = 0;
      for (const size_t field : round.fields) row += field;
      bytes += dispatch.of[size_t(peer)].ranks.size() * sizeof(Choice);
      bytes += dispatch.rowsFor(peer, rank) * row;
    }
  }
  return bytes;
}

// Each row crosses once, and a rank writes nothing to others but its signals: one for each block,
// peer and piece.
TEST(Tokens, MoveNoMoreBytesThanTheyMust) {
  constexpr unsigned kTokens = 16;
  TokenPlan plan = planOfThree(
      1, {{}, {.verb = TokenVerb::kAgain}, {.verb = TokenVerb::kCombine, .weightCount = 8}},
      kTokens);
  plan.blocks = 2;
  plan.threads = 64;
  plan.hidden = 4096;
  plan.shift = 0;
  for (TokenRound& round : plan.rounds) {
    round.pieces = 1 + unsigned(round.number);
    round.step = (kTokens + round.pieces - 1) / round.pieces;
    if (round.verb != TokenVerb::kCombine) round.fields = {4096, 4096, 128, 32};
  }
  std::vector<TokenRound> rounds = plan.rounds;
  std::vector<uint64_t> before(3), stores(3);  // of the operations before
  for (const TokenRound& last : rounds) {
    plan.rounds.assign(rounds.begin(), rounds.begin() + ptrdiff_t(last.number) + 1);
    World world({.seed = 3});
    GroupShape shape = shapeOf(plan);
    VirtualGroup group(world, shape);
    TokenProgram program(world, group, plan);
    group.start();
    const Report report = world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    program.check();
    for (int rank = 0; rank < 3; ++rank) {
      SCOPED_TRACE("round " + std::to_string(last.number) + " rank " + std::to_string(rank));
      const simt::Traffic& traffic = world.traffic(rank);
      const auto read = double(traffic.bytesReadThere - before[size_t(rank)]);
      const auto must = double(mustRead(plan, last, rank));
      EXPECT_GE(read, must);
      EXPECT_LE(read, 1.05 * must);
      before[size_t(rank)] = traffic.bytesReadThere;
      EXPECT_EQ(traffic.bytesWrittenThere, 0u);
      EXPECT_EQ(traffic.remoteStores - stores[size_t(rank)], last.pieces * plan.blocks * 2);
      stores[size_t(rank)] = traffic.remoteStores;
    }
  }
}
#endif

}  // namespace
}  // namespace mooncake::kernels
