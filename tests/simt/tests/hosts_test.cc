#include <gtest/gtest.h>
#include <optional>
#include <set>
#include <vector>

#include "collective_sweep.h"
#include "races.h"
#include "virtual_group.h"

// Collectives of ranks on several hosts, whose proxies carry the data.
namespace mooncake::kernels {
namespace {

// The host of each rank.
const std::vector<int> kSplits[] = {{0, 1},       {0, 0, 1},    {0, 1, 1},      {0, 1, 2},
                                    {0, 0, 0, 1}, {0, 1, 0, 1}, {0, 0, 1, 1, 1}};

constexpr OnlyVerb kAllReduceVerb = [](uint64_t seed) {
  return std::optional(seed % 2 ? Verb::kAllReduce : Verb::kAllReduceInPlace);
};

constexpr int kRoot = 1;  // of the first round

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
      // Reads of a rank that is out race. Beside graphs its wait for a decision would never end: there
      // the emulator's time does not pass while hosts stop kernels.
      if (!kFindsRaces && !ofGraphs && kills == 0)
        group.evict(int(drawn.draw(unsigned(ranks))), drawn.draw(most));
    };
    sweep(ranks, seeds, disturb, &swept, ofGraphs, only, hosts);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(swept.wentOn, 0u);
  if (!kFindsRaces && !ofGraphs) EXPECT_GT(swept.took, 0u);  // they run few seeds
}
constexpr uint64_t kFew = kFindsRaces ? 2 : kSeeds / 6;
// Enough to find a block that goes on alone and writes to memory that a proxy still reads.
constexpr uint64_t kSome = kFindsRaces ? 12 : kFew;
TEST(Hosts, OneShotGoesOn) { disturbSplits(kAllReduceVerb, false, kFew); }
TEST(Hosts, AllVerbsGoOn) { disturbSplits(kAnyVerb, false, kSome); }
TEST(Hosts, TwoShotGoesOn) { disturbSplits(kTwoShotVerb, false, kSome); }
TEST(Hosts, ReplaysGoOn) { disturbSplits(kAnyVerb, true, kFew); }

TEST(Hosts, RanksOfAHostReceiveInTurn) {
  Remote remote;
  for (const int rank : {0, 1, 2}) remote.hosts[rank] = 0b00111;
  for (const int rank : {3, 4}) remote.hosts[rank] = 0b11000;
  using Ranks = std::vector<int>;
  const auto receivers = [&](uint64_t active, const Ranks& from, int to) {
    Ranks found;
    for (const int rank : from) found.push_back(receiverOf(remote, active, rank, to));
    return found;
  };
  for (const int to : {3, 4}) EXPECT_EQ(receivers(0b11111, {0, 1, 2}, to), (Ranks{3, 4, 3}));
  for (const int to : {0, 1, 2}) EXPECT_EQ(receivers(0b11111, {3, 4}, to), (Ranks{0, 1}));
  EXPECT_EQ(receivers(0b11110, {1, 2}, 3), (Ranks{3, 4}));
  EXPECT_EQ(receivers(0b11110, {3, 4}, 1), (Ranks{1, 2}));
  EXPECT_EQ(receivers(0b01111, {0, 1, 2}, 3), (Ranks{3, 3, 3}));
}

// The least bytes of data that a rank must send to another host in a piece of `bytes`.
size_t leastBytes(Verb verb, const std::vector<int>& hosts, int from, int host, size_t bytes) {
  const int ranks = int(hosts.size());
  const auto segmentBytes = [&](int rank) {
    const Part segment = segmentOf((uint64_t(1) << ranks) - 1, rank, bytes);
    return segment.end - segment.begin;
  };
  size_t least = isTwoShot(verb) ? segmentBytes(from) : 0;
  for (int rank = 0; rank < ranks; ++rank) {
    if (hosts[size_t(rank)] != host) continue;
    const bool isReader = hasParts(verb) || (hasReader(verb) && rank == kRoot);
    least += isTwoShot(verb) ? segmentBytes(rank) : isReader ? bytes : 0;
  }
  return isTwoShot(verb) || hasParts(verb) || hasReader(verb) ? least : bytes;
}

// A host gets only bytes that its ranks read, and each of them once. Mails hardly count.
TEST(Hosts, PushNoMoreBytesThanTheyMust) {
  constexpr size_t kCount = 3 * 2048, kBytes = 4 * kCount;
  for (const std::vector<int>& hosts : kSplits) {
    const int ranks = int(hosts.size());
    for (const Verb verb : kVerbs) {
      for (const unsigned pieces : {1, 3}) {
        World world({.seed = 3});
        VirtualGroup group(world,
                           {.ranks = ranks, .bankBytes = kBytes * size_t(ranks), .hostOf = hosts});
        Case with(1, ranks);
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
        for (int rank = 0; rank < ranks; ++rank) {
          for (const int host : std::set(hosts.begin(), hosts.end())) {
            if (host == hosts[size_t(rank)]) continue;
            size_t data = 0, all = 0;
            for (int peer = 0; peer < ranks; ++peer) {
              if (hosts[size_t(peer)] != host) continue;
              data += group.pushed(rank, peer).data;
              all += group.pushed(rank, peer).data + group.pushed(rank, peer).mails;
            }
            const size_t least = program.inputs(rank)
                                     ? pieces * leastBytes(verb, hosts, rank, host, kBytes / pieces)
                                     : 0;
            EXPECT_EQ(data, least) << "verb " << int(verb) << ", " << ranks << " ranks";
            if (least && pieces == 1) EXPECT_LE(double(all), 1.05 * double(least));
          }
        }
      }
    }
  }
}

// The others have all data of the last piece. They count a rank as lost while it reads a piece in the
// inbox of another one, to which they go on to push, before that one has told it that it is out.
void readPieceWhileOut(unsigned piece) {
  if (kFindsRaces) GTEST_SKIP() << "reads of a rank that is out race";
  constexpr int kRanks = 3, kOut = 2;
  constexpr unsigned kPieces = 5;
  constexpr size_t kPiece = 256, kBytes = kPieces * kPiece;
  unsigned ended = 0, hadMet = 0;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    World world({.seed = seed});
    VirtualGroup group(world, {.ranks = kRanks, .blocks = 1, .hostOf = {0, 1, 1}, .seed = seed});
    group.delayDecisions(1, 150'000'000);
    // The mails that tell of the last piece come late: so none of the two ends the operation.
    group.proxy(0).delay(1, 3 * kPieces - 1, 90'000'000);
    group.proxy(1).delay(0, 3 * kPieces - 1, 90'000'000);
    std::vector<unsigned char> inputs[kRanks], outputs[kRanks];
    for (int rank = 0; rank < kRanks; ++rank) {
      for (size_t i = 0; i < kBytes; ++i)
        inputs[rank].push_back(static_cast<unsigned char>(1 + size_t(rank) * 5 + i / kPiece));
      outputs[rank].resize(kBytes);
      Exchange exchange{};
      exchange.call = 1;
      exchange.root = -1;
      exchange.pieces = kPieces;
      exchange.piece = kPiece;
      exchange.bytes = kBytes;
      exchange.inputCount = 1;
      exchange.inputs[0] = inputs[rank].data();
      unsigned char* const output = outputs[rank].data();
      group.call(rank, "broadcast", exchange, [&, rank, output](const Exchange& made) {
        exchangeAll(made, kBytes, [&](const GroupState&, const Turn& turn, unsigned) {
          if (rank == kOut && turn.number == piece) {
            if (threadIdx.x == 0) {
              const uint64_t last = lastSerial(turn), deadline = now() + 300'000'000;
              const auto waitFor = [&](const auto& isThere) {
                while (!isThere() && now() < deadline) relax();
              };
              waitFor(
                  [&] { return group.state(0).hadAll == last && group.state(1).hadAll == last; });
              group.evict(kOut);
              // The first rank has begun anew: data and their mail.
              waitFor([&] { return group.completed(0, 1) == 3 * kPieces + 2; });
              hadMet += now() < deadline;
            }
            __syncthreads();
          }
          copyBytes(output + turn.number * kPiece, turn.data[0], kPiece);
        });
      });
    }
    group.start();
    const Report report = world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == kOut && group.state(kOut).done == 0) continue;
      ended += rank == kOut;
      ASSERT_EQ(group.state(rank).done, 1u);
      EXPECT_EQ(outputs[rank], inputs[0]) << "rank " << rank << " seed " << seed;
    }
  }
  EXPECT_GT(ended, 0u);
  EXPECT_GE(hadMet, kSeeds - kSeeds / 10);  // seldom the wire is slower than the deadline
}
TEST(Hosts, ARankThatIsOutReadsTheLastPiece) { readPieceWhileOut(4); }
TEST(Hosts, ARankThatIsOutReadsThePieceBefore) { readPieceWhileOut(3); }

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
      for (size_t round = 0; round < state.done; ++round) {
        int32_t due = 0;
        for (int peer = 0; peer < 3; ++peer) due += Disturbed::inputOf(round + 1, peer);
        for (const int32_t sum : with.tensors[round * 3 + size_t(rank)]) ASSERT_EQ(sum, due);
      }
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
