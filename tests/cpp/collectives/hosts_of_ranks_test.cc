#include <gtest/gtest.h>
#include <vector>

#include "peers/allocation_exchange.h"

namespace mooncake {

using Ranks = std::vector<uint64_t>;

TEST(HostsOfRanks, RanksThatReachEachOtherAreOnOneHost) {
  EXPECT_EQ(groupByHost(Ranks{0b1}), (Ranks{0b1}));
  EXPECT_EQ(groupByHost(Ranks{0b11, 0b11}), (Ranks{0b11, 0b11}));
  EXPECT_EQ(groupByHost(Ranks{0b01, 0b10}), (Ranks{0b01, 0b10}));
  EXPECT_EQ(groupByHost(Ranks{0b1011, 0b1011, 0b0100, 0b1011}),
            (Ranks{0b1011, 0b1011, 0b0100, 0b1011}));
}

TEST(HostsOfRanks, RanksThatReachOthersThanTheirPeersAreApart) {
  // Rank 0 reaches rank 1, and not the other way around.
  EXPECT_EQ(groupByHost(Ranks{0b011, 0b010, 0b100}), (Ranks{0b001, 0b010, 0b100}));
  // Ranks 0 and 2 reach rank 1, and not each other.
  EXPECT_EQ(groupByHost(Ranks{0b011, 0b111, 0b110}), (Ranks{0b001, 0b010, 0b100}));
  // A rank that does not name itself.
  EXPECT_EQ(groupByHost(Ranks{0b10, 0b10}), (Ranks{0b01, 0b10}));
}

TEST(HostsOfRanks, ALostRankIsOnNone) {
  EXPECT_EQ(groupByHost(Ranks{0, 0b110, 0b110}), (Ranks{0, 0b110, 0b110}));
  EXPECT_EQ(groupByHost(Ranks{0b0001, 0, 0b1100, 0b1100}), (Ranks{0b0001, 0, 0b1100, 0b1100}));
}

TEST(HostsOfRanks, EveryRankIsOnOneHost) {
  uint64_t random = 1;
  for (int round = 0; round < 1000; ++round) {
    Ranks reached(1 + random % 32);
    for (uint64_t& one : reached) {
      random = random * 6364136223846793005u + 1442695040888963407u;
      one = random >> 32;
    }
    const Ranks hosts = groupByHost(reached);
    ASSERT_EQ(hosts.size(), reached.size());
    for (size_t rank = 0; rank < hosts.size(); ++rank) {
      EXPECT_TRUE(hosts[rank] >> rank & 1);
      for (int other = 0; other < 64; ++other) {
        if (!(hosts[rank] >> other & 1)) continue;
        ASSERT_LT(size_t(other), hosts.size());
        EXPECT_EQ(hosts[size_t(other)], hosts[rank]);
      }
    }
  }
}

}  // namespace mooncake
