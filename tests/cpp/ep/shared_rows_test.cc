#include "ep/shared_rows.h"

#include <gtest/gtest.h>
#include <map>
#include <numeric>

#include "ep/layout.h"

namespace mooncake::ep {
namespace {

// Hosts of these sizes, with consecutive ranks.
std::vector<Hosts::Memory> mappedBy(const std::vector<int>& hostSizes, uint64_t sendBytes = 1) {
  std::vector<Hosts::Memory> mapped;
  int first = 0;
  for (const int size : hostSizes) {
    GroupRanks host;
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

constexpr size_t kRows = 1000;

// Returns all places of rows that one rank of a host receives for the host, with their sources.
// Checks that they are inside the send memory, and not among the rank's own outgoing rows.
std::map<std::pair<int, size_t>, int> placesOf(const SharedRows& shared,
                                               const std::vector<int>& ranks, size_t bytes,
                                               bool arePushed) {
  std::map<std::pair<int, size_t>, int> places;
  for (const auto& host : shared.hosts()) {
    for (const int source : ranks) {
      if (std::ranges::binary_search(host, source)) continue;
      if (!arePushed && host.size() == 1) continue;  // the rank fetches for itself only
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
        // Rows with a place on the lost rank are fetched instead.
        const int was = all.pushed(source, all.hostOf(host.front()))->by;
        EXPECT_EQ(shared.pushed(source, host).has_value(), was != lost);
      }
    }
  }
}

// Such a late push must not overwrite fetched rows either.
TEST(SharedRows, NothingIsFetchedToAPushedPlace) {
  const size_t bytes = 5 * kRows;  // five places
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
    // Two ranks on each host: one place for the own rows, and one each for packed, pushed and
    // fetched rows.
    const Hosts hosts(mappedBy({2, 2}, roomFor * kRows));
    const SharedRows shared(hosts, firstRanks(4), kRows, 0);
    EXPECT_EQ(shared.isShared(shared.hosts()[0], 1), roomFor >= 3);
    EXPECT_EQ(shared.pushed(2, shared.hosts()[0]).has_value(), roomFor == 4);
  }
}

// A range of bytes that an attempt may use in the send memory of one rank. Own and packed rows have
// their largest size: each rank of an unshared host wants all tokens but one, so that they are
// copied as long as there is room.
struct Interval {
  size_t begin, end;
  const char* what;
  int rank;  // destination or source of the rows
};

std::vector<Interval> standingAt(int rank, const SharedRows& attempt, const SharedRows& whole,
                                 const std::vector<int>& ranks) {
  std::vector<Interval> all{{0, kRows, "own rows of", rank}};
  size_t at = kRows;
  for (const auto& host : attempt.hosts()) {
    const bool isOurs = std::ranges::binary_search(host, rank);
    const bool isShared = attempt.isShared(host, 2);
    for (size_t copies = isOurs ? 0 : isShared ? 1 : host.size(); copies > 0; --copies) {
      if (!attempt.isPackingBounded() && at + kRows > attempt.ownEnd()) continue;  // gives all rows
      all.push_back({at, at + kRows, "packed for", host.front()});
      at += kRows;
    }
    if (!isOurs || !isShared) continue;
    for (const int source : ranks) {
      if (std::ranges::binary_search(host, source)) continue;
      const auto place = attempt.fetched(source, host);
      if (place.by == rank)
        all.push_back({place.offset, place.offset + kRows, "fetched from", source});
    }
  }
  EXPECT_LE(at, attempt.ownEnd());
  // Every source may push, even a lost one: its rows may still be on their way.
  const auto& wholeHost = whole.hostOf(rank);
  for (const auto& host : whole.hosts()) {
    if (std::ranges::binary_search(host, rank)) continue;
    for (const int source : host) {
      const auto place = whole.pushed(source, wholeHost);
      if (place && place->by == rank)
        all.push_back({place->offset, place->offset + kRows, "pushed by", source});
    }
  }
  return all;
}

// All combinations of hosts, lost ranks, and room in halves of a place.
TEST(SharedRows, NothingStandsOnAnythingElseWhoeverIsLost) {
  size_t withPushes = 0, withoutSharing = 0;
  for (const auto& sizes : Ranks{{4, 4, 1},
                                 {3, 1, 1, 1},
                                 {3, 3},
                                 {2, 2, 1},
                                 {4, 3, 1},
                                 {1, 1, 1},
                                 {5, 2},
                                 {2, 1},
                                 {2, 2, 2, 1},
                                 {6, 1, 1}}) {
    const auto count = int(mappedBy(sizes).size());
    for (size_t halves = 2; halves <= 4 * size_t(count); ++halves) {
      const size_t room = halves * kRows / 2;
      const Hosts hosts(mappedBy(sizes, room));
      const SharedRows whole(hosts, firstRanks(count), kRows, 1);
      for (unsigned left = 1; left < 1U << count; ++left) {
        std::vector<int> ranks;
        for (int r = 0; r < count; ++r) {
          if ((left >> r & 1U) != 0) ranks.push_back(r);
        }
        const SharedRows attempt(hosts, ranks, kRows, 1);
        ASSERT_EQ(attempt.ownEnd(), whole.ownEnd());
        for (const int rank : ranks) {
          auto all = standingAt(rank, attempt, whole, ranks);
          std::ranges::sort(all, {}, &Interval::begin);
          for (size_t i = 0; i < all.size(); ++i) {
            const size_t end = i + 1 < all.size() ? all[i + 1].begin : room;
            ASSERT_LE(all[i].end, end)
                << all[i].what << " " << all[i].rank << " on rank " << rank << ", " << halves
                << " halves of a place, ranks " << left << " of " << testing::PrintToString(sizes);
          }
        }
      }
      withPushes += whole.pushed(count - 1, whole.hostOf(0)).has_value();
      withoutSharing += !whole.isPackingBounded();
    }
  }
  EXPECT_GT(withPushes, 0U);
  EXPECT_GT(withoutSharing, 0U);
}

// A buffer of the hinted size shares and pushes rows on hosts of usual sizes, in every attempt.
TEST(SharedRows, TheSizeHintHasRoomForSharingAndPushing) {
  struct Sizes {
    size_t hosts;
    int ranksOfEach;
    int leastExperts;  // of each rank
  };
  // Hosts of one rank or two push bf16 rows only if each rank has two experts: a rank needs a place
  // for each host, and one for each rank that pushes to it.
  for (const auto& [numHosts, each, leastExperts] : {Sizes{2, 2, 1},
                                                     {3, 2, 2},
                                                     {16, 2, 2},
                                                     {2, 3, 1},
                                                     {5, 3, 1},
                                                     {6, 3, 2},
                                                     {2, 4, 1},
                                                     {4, 4, 1},
                                                     {18, 4, 1},
                                                     {2, 8, 1},
                                                     {4, 8, 1},
                                                     {8, 8, 1},
                                                     {16, 8, 1},
                                                     {2, 16, 1},
                                                     {2, 1, 2},
                                                     {8, 1, 2}}) {
    const int count = int(numHosts) * each;
    for (const int local : {leastExperts, 2, 18}) {
      for (const size_t hidden : {2048, 7168}) {
        const Shape shape{
            .numRanks = count, .numExperts = local * count, .maxTokens = 128, .hidden = hidden};
        const BufferLayout layout(sizeHint(shape));
        const Hosts hosts(mappedBy(std::vector<int>(numHosts, each), layout.sendBytes()));
        for (const auto format : {RowFormat::kBf16, RowFormat::kFp8}) {
          const size_t rowsBytes = shape.maxTokens * dispatchRowBytes(hidden, format);
          const SharedRows shared(hosts, firstRanks(count), rowsBytes, 4);
          const auto& host = shared.hosts().back();
          EXPECT_EQ(shared.isShared(host, 5), each > 1) << numHosts << " x " << each;
          EXPECT_TRUE(shared.pushed(0, host)) << numHosts << " x " << each << ", " << local;
        }
      }
    }
  }
}

}  // namespace
}  // namespace mooncake::ep
