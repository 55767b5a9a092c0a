#include "ep/shared_rows.h"

#include <gtest/gtest.h>
#include <numeric>
#include <set>

namespace mooncake::ep {
namespace {

// Ranks of a host side by side.
std::vector<RankSet> mappedBy(const std::vector<int>& hostSizes) {
  std::vector<RankSet> mapped;
  int first = 0;
  for (const int size : hostSizes) {
    RankSet host;
    for (int r = first; r < first + size; ++r) host.add(r);
    mapped.insert(mapped.end(), size_t(size), host);
    first += size;
  }
  return mapped;
}

std::vector<int> firstRanks(int count) {
  std::vector<int> ranks(static_cast<size_t>(count));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

using Ranks = std::vector<std::vector<int>>;

TEST(Hosts, AreTheRanksThatMapEachOther) {
  const Hosts hosts(mappedBy({2, 1, 3}), 1);
  EXPECT_EQ(hosts.split(firstRanks(6)), (Ranks{{0, 1}, {2}, {3, 4, 5}}));
  EXPECT_EQ(hosts.split({1, 3, 5}), (Ranks{{1}, {3, 5}}));
  EXPECT_EQ(Hosts().split({1, 3}), (Ranks{{1}, {3}}));
}

TEST(Hosts, OfRanksThatDisagreeAreNone) {
  auto mapped = mappedBy({3});
  mapped[2] = {2, 1};
  EXPECT_EQ(Hosts(mapped, 1).split(firstRanks(3)), (Ranks{{0}, {1}, {2}}));
}

TEST(Hosts, WhoWasNotThereIsByItself) {
  auto mapped = mappedBy({3});
  mapped[1] = {};
  EXPECT_EQ(Hosts(mapped, 1).split(firstRanks(3)), (Ranks{{0, 2}, {1}}));
}

TEST(SharedRows, ATokenIsNamedOnce) {
  const ExpertMap experts(8, 4);  // two each
  const std::vector<int32_t> chosen = {0, 1, 4, 5, kNoExpert, kNoExpert, 7, 2};
  EXPECT_EQ(tokensFor(chosen, 2, experts, {{0, 1}}), (std::vector<uint32_t>{0, 3}));
  EXPECT_EQ(tokensFor(chosen, 2, experts, {{2, 3}}), (std::vector<uint32_t>{1, 3}));
  EXPECT_TRUE(tokensFor({}, 2, experts, {{2, 3}}).empty());
}

// What is fetched lies in the send memory, and two fetches never lie in one place.
TEST(SharedRows, EveryFetchHasAPlaceOfItsOwn) {
  constexpr size_t kRows = 1000;
  for (const auto& sizes : Ranks{{2, 2}, {4, 4}, {1, 7}, {3, 2, 2}, {5, 1, 1, 1}}) {
    const auto mapped = mappedBy(sizes);
    const auto count = int(mapped.size());
    const size_t bytes = 2 * size_t(count) * kRows;
    const SharedRows shared(Hosts(mapped, bytes), firstRanks(count), kRows, 1);
    std::set<std::pair<int, size_t>> places;
    size_t fetches = 0;
    for (const auto& host : shared.hosts()) {
      EXPECT_EQ(shared.isShared(host, 2), host.size() > 1);
      EXPECT_FALSE(shared.isShared(host, 1));
      for (int source = 0; source < count; ++source) {
        if (std::ranges::binary_search(host, source)) continue;
        const auto [by, offset] = shared.fetch(source, host);
        EXPECT_TRUE(std::ranges::binary_search(host, by));
        EXPECT_GE(offset, kRows * shared.hosts().size());
        EXPECT_LE(offset + kRows, bytes);
        places.emplace(by, offset);
        ++fetches;
      }
    }
    EXPECT_EQ(places.size(), fetches);
  }
}

TEST(SharedRows, WhereThereIsNoRoomEachRankFetchesItsOwn) {
  const auto mapped = mappedBy({2, 2});
  for (const size_t roomFor : {2u, 3u}) {
    const SharedRows shared(Hosts(mapped, roomFor * 1000), firstRanks(4), 1000, 0);
    EXPECT_EQ(shared.isShared(shared.hosts()[0], 1), roomFor == 3);
  }
}

}  // namespace
}  // namespace mooncake::ep
