#include "ep/shared_rows.h"

#include <gtest/gtest.h>
#include <map>
#include <numeric>

namespace mooncake::ep {
namespace {

// Ranks of a host side by side.
std::vector<Hosts::Memory> mappedBy(const std::vector<int>& hostSizes, uint64_t sendBytes = 1) {
  std::vector<Hosts::Memory> mapped;
  int first = 0;
  for (const int size : hostSizes) {
    RankSet host;
    for (int r = first; r < first + size; ++r) host.add(r);
    mapped.insert(mapped.end(), size_t(size), {.mapped = host, .sendBytes = sendBytes});
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
  const Hosts hosts(mappedBy({2, 1, 3}));
  EXPECT_EQ(hosts.split(firstRanks(6)), (Ranks{{0, 1}, {2}, {3, 4, 5}}));
  EXPECT_EQ(hosts.split({1, 3, 5}), (Ranks{{1}, {3, 5}}));
  EXPECT_EQ(hosts.splitAll(), hosts.split(firstRanks(6)));
}

TEST(Hosts, OfRanksThatDisagreeAreNone) {
  auto mapped = mappedBy({3});
  mapped[2].mapped = {2, 1};
  EXPECT_EQ(Hosts(mapped).split(firstRanks(3)), (Ranks{{0}, {1}, {2}}));
}

TEST(Hosts, WhoWasNotThereIsByItself) {
  auto mapped = mappedBy({3});
  mapped[1] = {};
  EXPECT_EQ(Hosts(mapped).split(firstRanks(3)), (Ranks{{0, 2}, {1}}));
}

TEST(SharedRows, ATokenIsNamedOnce) {
  const ExpertMap experts(8, 4);  // two each
  const std::vector<int32_t> chosen = {0, 1, 4, 5, kNoExpert, kNoExpert, 7, 2};
  EXPECT_EQ(tokensFor(chosen, 2, experts, {{0, 1}}), (std::vector<uint32_t>{0, 3}));
  EXPECT_EQ(tokensFor(chosen, 2, experts, {{2, 3}}), (std::vector<uint32_t>{1, 3}));
  EXPECT_TRUE(tokensFor({}, 2, experts, {{2, 3}}).empty());
}

constexpr size_t kRows = 1000;

// All places of rows that come to one rank of a host, each with its source. None is outside of the
// send memory or among the rows that it gives itself.
std::map<std::pair<int, size_t>, int> placesOf(const SharedRows& shared,
                                               const std::vector<int>& ranks, size_t bytes,
                                               bool arePushed) {
  std::map<std::pair<int, size_t>, int> places;
  for (const auto& host : shared.hosts()) {
    for (const int source : ranks) {
      if (std::ranges::binary_search(host, source)) continue;
      if (!arePushed && host.size() == 1) continue;  // fetches for itself
      std::optional<SharedRows::Place> place = shared.fetched(source, host);
      if (arePushed) place = shared.pushed(source, host);
      if (!place) continue;
      EXPECT_TRUE(std::ranges::binary_search(host, place->by));
      EXPECT_GE(place->offset, kRows * shared.hosts().size());
      EXPECT_LE(place->offset + kRows, bytes);
      EXPECT_TRUE(places.emplace(std::pair(place->by, place->offset), source).second);
    }
  }
  return places;
}

TEST(SharedRows, EverySourceHasAPlaceOfItsOwn) {
  for (const auto& sizes : Ranks{{2, 2}, {4, 4}, {1, 7}, {3, 2, 2}, {5, 1, 1, 1}, {1, 1, 1}}) {
    const auto count = int(mappedBy(sizes).size());
    const size_t bytes = 4 * size_t(count) * kRows;
    const SharedRows shared(Hosts(mappedBy(sizes, bytes)), firstRanks(count), kRows, 1);
    size_t crossing = 0;
    for (const auto& host : shared.hosts()) {
      EXPECT_EQ(shared.isShared(host, 2), host.size() > 1);
      EXPECT_FALSE(shared.isShared(host, 1));
      crossing += size_t(count) - host.size();
    }
    const auto pushed = placesOf(shared, firstRanks(count), bytes, true);
    EXPECT_EQ(pushed.size(), crossing);
    for (const auto& [place, source] : placesOf(shared, firstRanks(count), bytes, false))
      EXPECT_FALSE(pushed.contains(place)) << source;
  }
}

// A push of an attempt that was given up may still be on its way in the next one.
TEST(SharedRows, APushedPlaceBelongsToItsSourceForEver) {
  const size_t bytes = 40 * kRows;
  const Hosts hosts(mappedBy({3, 2, 2}, bytes));
  const SharedRows all(hosts, firstRanks(7), kRows, 1);
  const auto before = placesOf(all, firstRanks(7), bytes, true);
  for (int lost = 0; lost < 7; ++lost) {
    std::vector<int> left = firstRanks(7);
    std::erase(left, lost);
    const SharedRows shared(hosts, left, kRows, 1);
    for (const auto& [place, source] : placesOf(shared, left, bytes, true))
      EXPECT_EQ(before.at(place), source);
    for (const auto& host : shared.hosts()) {
      for (const int source : left) {
        if (std::ranges::binary_search(host, source)) continue;
        // What would come to the lost rank is fetched.
        const int was = all.pushed(source, all.hostOf(host.front()))->by;
        EXPECT_EQ(shared.pushed(source, host).has_value(), was != lost);
      }
    }
  }
}

// Nor does anybody fetch to where such a one may still come.
TEST(SharedRows, NothingIsFetchedToAPushedPlace) {
  const size_t bytes = 4 * kRows;  // as much as all six need, and less than some five would
  const Hosts hosts(mappedBy({3, 3}, bytes));
  const auto pushed = placesOf({hosts, firstRanks(6), kRows, 0}, firstRanks(6), bytes, true);
  ASSERT_EQ(pushed.size(), 6U);
  for (int lost = 0; lost < 6; ++lost) {
    std::vector<int> left = firstRanks(6);
    std::erase(left, lost);
    const SharedRows shared(hosts, left, kRows, 0);
    for (const auto& host : shared.hosts()) {
      for (const int source : left) {
        if (std::ranges::binary_search(host, source) || !shared.isShared(host, 1)) continue;
        const auto place = shared.fetched(source, host);
        EXPECT_FALSE(pushed.contains({place.by, place.offset})) << lost << " " << source;
      }
    }
  }
}

TEST(SharedRows, WhereThereIsNoRoomEachRankFetchesItsOwn) {
  for (const size_t roomFor : {2u, 3u, 4u}) {
    const Hosts hosts(mappedBy({2, 2}, roomFor * kRows));
    const SharedRows shared(hosts, firstRanks(4), kRows, 0);
    EXPECT_EQ(shared.isShared(shared.hosts()[0], 1), roomFor >= 3);
    EXPECT_EQ(shared.pushed(2, shared.hosts()[0]).has_value(), roomFor == 4);
  }
}

}  // namespace
}  // namespace mooncake::ep
