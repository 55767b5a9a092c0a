#include "kernels/signals.cuh"

#include <functional>
#include <gtest/gtest.h>
#include <vector>

#include "races.h"
#include "tests/simt/world.h"

namespace mooncake::kernels {
namespace {

using simt::kFindsRaces;
using simt::racesReported;
using simt::World;

constexpr uint64_t kSeeds = kFindsRaces ? 4 : 40;
constexpr uint32_t kChannels = 3;
constexpr uint64_t kTimeoutNs = 200'000'000;

// Ranks with a pad each, and a word of data that signals hand over.
struct Ranks {
  explicit Ranks(int ranks)
      : size(ranks), pads(size_t(ranks)), data(size_t(ranks)), host(size_t(ranks)) {
    for (auto& pad : pads) pad.resize(kChannels * size_t(ranks));
  }
  uint64_t others(int rank) const { return ((uint64_t(1) << size) - 1) & ~(uint64_t(1) << rank); }
  SignalArguments arguments(int rank, uint32_t channel, uint64_t puts, uint64_t waits) {
    SignalArguments a{.host = &host[size_t(rank)],
                      .pads = {},
                      .rank = rank,
                      .ranks = size,
                      .channel = channel,
                      .puts = puts,
                      .waits = waits,
                      .timeoutNs = kTimeoutNs};
    for (int peer = 0; peer < size; ++peer) a.pads[peer] = pads[size_t(peer)].data();
    return a;
  }
  void signal(World& world, int rank, const SignalArguments& a) {
    world.launch(rank, 0, "signal", {1}, {kMaxRanks}, 0, [a] { mooncake_signal(a); });
  }
  // Another kernel of the rank, before or after signals on its stream.
  void kernel(World& world, int rank, std::function<void()> body) {
    world.launch(rank, 0, "work", {1}, {1}, 0, std::move(body));
  }
  bool isClean() const {
    for (const auto& pad : pads) {
      for (const uint32_t word : pad) {
        if (word) return false;
      }
    }
    return true;
  }

  const int size;
  std::vector<std::vector<uint32_t>> pads;
  std::vector<uint64_t> data;
  std::vector<SignalWords> host;
};

// Barriers part the writes of a round from its reads, and these from the next writes.
TEST(Signals, ABarrierOrdersMemoryOfAllRanks) {
  const unsigned races = racesReported();
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Ranks ranks(2 + int(seed % 4));
    World world({.seed = seed});
    std::vector<uint64_t> seen(size_t(ranks.size));
    for (int rank = 0; rank < ranks.size; ++rank) {
      const auto barrier = [&](uint32_t channel) {
        ranks.signal(world, rank,
                     ranks.arguments(rank, channel, ranks.others(rank), ranks.others(rank)));
      };
      for (uint64_t round = 1; round <= 4; ++round) {
        ranks.kernel(world, rank, [&ranks, rank, round] {
          ranks.data[size_t(rank)] = round * 100 + uint64_t(rank);
        });
        barrier(0);
        ranks.kernel(world, rank, [&ranks, &seen, rank, round] {
          for (int peer = 0; peer < ranks.size; ++peer)
            seen[size_t(rank)] += ranks.data[size_t(peer)] == round * 100 + uint64_t(peer);
        });
        barrier(uint32_t(round) % kChannels);
      }
    }
    const auto report = world.run();
    ASSERT_TRUE(report.ok) << "seed " << seed << ": " << report.problem;
    ASSERT_EQ(racesReported(), races) << "seed " << seed;
    for (const uint64_t right : seen) EXPECT_EQ(right, uint64_t(4 * ranks.size)) << seed;
    EXPECT_TRUE(ranks.isClean()) << seed;
  }
}

// Each signal is taken once, and the next one waits for that.
TEST(Signals, OneGoesToOne) {
  const unsigned races = racesReported();
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Ranks ranks(2);
    World world({.seed = seed});
    uint64_t right = 0;
    for (uint64_t round = 1; round <= 5; ++round) {
      ranks.kernel(world, 0, [&ranks, round] { ranks.data[0] = round; });
      ranks.signal(world, 0, ranks.arguments(0, 2, 2, 0));
      ranks.signal(world, 0, ranks.arguments(0, 1, 0, 2));
      ranks.signal(world, 1, ranks.arguments(1, 2, 0, 1));
      ranks.kernel(world, 1, [&ranks, &right, round] { right += ranks.data[0] == round; });
      ranks.signal(world, 1, ranks.arguments(1, 1, 1, 0));
    }
    const auto report = world.run();
    ASSERT_TRUE(report.ok) << "seed " << seed << ": " << report.problem;
    ASSERT_EQ(racesReported(), races) << "seed " << seed;
    EXPECT_EQ(right, 5u) << seed;
    EXPECT_TRUE(ranks.isClean());
  }
}

TEST(Signals, ALateRankEndsTheWaitAndIsNamed) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Ranks ranks(3);
    World world({.seed = seed});
    for (const int rank : {0, 1})
      ranks.signal(world, rank, ranks.arguments(rank, 0, ranks.others(rank), ranks.others(rank)));
    const auto report = world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    for (const int rank : {0, 1}) {
      EXPECT_EQ(Missed(ranks.host[size_t(rank)].missed[2]), Missed::kLate);
      EXPECT_EQ(Missed(ranks.host[size_t(rank)].missed[1 - rank]), Missed::kNone);
    }
    EXPECT_GE(report.virtualNs, kTimeoutNs);
  }
}

// The waits end ahead of their timeout, also those for ranks that live: they may know of the loss.
TEST(Signals, ALostRankEndsTheWaits) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Ranks ranks(3);
    World world({.seed = seed});
    ranks.signal(world, 0, ranks.arguments(0, 0, ranks.others(0), ranks.others(0)));
    world.host(0, "host", [&] { storeRelaxedSystem(&ranks.host[0].lost, uint64_t(4)); });
    const auto report = world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    EXPECT_EQ(Missed(ranks.host[0].missed[1]), Missed::kNone);
    EXPECT_LT(report.virtualNs, kTimeoutNs / 2);
  }
}

}  // namespace
}  // namespace mooncake::kernels
