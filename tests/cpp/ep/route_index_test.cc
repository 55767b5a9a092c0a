#include "ep/route_index.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <numeric>
#include <random>
#include <tuple>

#include "ep/hosts.h"
#include "ep/shared_rows.h"
#include "ep/token_lists.h"

// The routing of a dispatch reads each table once. These tests compare its results with plain
// definitions, which search and count anew for each rank and each host.
namespace mooncake::ep {
namespace {

using Ranks = std::vector<int>;

// Returns the tokens that name an expert of one of these ranks.
std::vector<uint32_t> plainTokensFor(std::span<const int32_t> chosen, size_t topk,
                                     const ExpertMap& experts, const Ranks& ranks) {
  std::vector<uint32_t> tokens;
  for (size_t i = 0; i < chosen.size(); ++i) {
    const auto token = uint32_t(i / topk);
    if (chosen[i] == kNoExpert || (!tokens.empty() && tokens.back() == token)) continue;
    if (std::ranges::find(ranks, experts.owner(chosen[i])) != ranks.end()) tokens.push_back(token);
  }
  return tokens;
}

using Choice = std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>;

std::vector<Choice> plainChoices(std::span<const int32_t> chosen, size_t topk,
                                 const ExpertMap& experts, const Ranks& host, int rank) {
  const auto ofHost = plainTokensFor(chosen, topk, experts, host);
  const auto ofRank = plainTokensFor(chosen, topk, experts, {rank});
  const auto indexIn = [](const std::vector<uint32_t>& tokens, uint32_t token) {
    return uint32_t(std::ranges::find(tokens, token) - tokens.begin());
  };
  std::vector<Choice> choices;
  for (size_t i = 0; i < chosen.size(); ++i) {
    if (chosen[i] == kNoExpert || experts.owner(chosen[i]) != rank) continue;
    const auto token = uint32_t(i / topk);
    choices.emplace_back(token, uint32_t(experts.local(chosen[i])), indexIn(ofHost, token),
                         indexIn(ofRank, token));
  }
  return choices;
}

std::vector<Choice> asTuples(std::span<const RouteIndex::Choice> choices) {
  std::vector<Choice> tuples;
  for (const auto& [token, expert, inHost, inRank] : choices)
    tuples.emplace_back(token, expert, inHost, inRank);
  return tuples;
}

std::vector<uint32_t> asVector(std::span<const uint32_t> tokens) {
  return {tokens.begin(), tokens.end()};
}

// A random group: hosts of unequal size, experts spread unevenly, some ranks left out.
struct Draw {
  explicit Draw(unsigned seed) : random(seed) {
    const int numHosts = upTo(1, 6);
    std::vector<Hosts::Memory> memories;
    for (int h = 0; h < numHosts; ++h) {
      const int first = int(memories.size()), size = upTo(1, 5);
      GroupRanks host;
      for (int r = first; r < first + size; ++r) host.add(r);
      memories.insert(memories.end(), size_t(size), {.mapped = host, .sendBytes = 1 << 20});
    }
    numRanks = int(memories.size());
    hosts.emplace(std::move(memories));
    std::vector<int> owners(size_t(upTo(1, 40)));
    for (int& owner : owners) owner = upTo(0, numRanks - 1);
    experts.emplace(std::move(owners), numRanks);
    for (int r = 0; r < numRanks; ++r) {
      if (upTo(0, 4) > 0) there.push_back(r);
    }
    if (there.empty()) there.push_back(0);
    topk = size_t(upTo(1, 9));
  }

  int upTo(int least, int most) { return std::uniform_int_distribution(least, most)(random); }

  // Some experts are named more than once, and some entries name none.
  std::vector<int32_t> table() {
    std::vector<int32_t> chosen(size_t(upTo(0, 20)) * topk);
    for (int32_t& expert : chosen) {
      expert = upTo(0, 5) == 0 ? kNoExpert : upTo(0, experts->numExperts() - 1);
    }
    return chosen;
  }

  std::mt19937 random;
  int numRanks = 0;
  std::optional<Hosts> hosts;
  std::optional<ExpertMap> experts;
  Ranks there;
  size_t topk = 1;
};

constexpr unsigned kDraws = 300;

TEST(RouteIndex, AgreesWithThePlainDefinition) {
  for (unsigned seed = 0; seed < kDraws; ++seed) {
    Draw draw(seed);
    const HostTable hosts(draw.hosts->split(draw.there));
    std::vector<std::vector<int32_t>> tables;
    for (size_t i = 0; i < draw.there.size(); ++i) tables.push_back(draw.table());
    for (const int rank : draw.there) {
      RouteIndex index(*draw.experts, &hosts, rank), mapped(*draw.experts, nullptr, rank);
      for (size_t i = 0; i < tables.size(); ++i) {
        index.read(draw.there[i], tables[i], draw.topk);
        mapped.read(draw.there[i], tables[i], draw.topk);
        for (size_t h = 0; h < hosts.size(); ++h) {
          ASSERT_EQ(index.tokensFor(h),
                    plainTokensFor(tables[i], draw.topk, *draw.experts, hosts.hosts()[h]).size())
              << "seed " << seed;
        }
      }
      for (size_t i = 0; i < tables.size(); ++i) {
        auto plain = plainChoices(tables[i], draw.topk, *draw.experts, hosts.hostOf(rank), rank);
        ASSERT_EQ(asTuples(index.choicesOf(draw.there[i])), plain) << "seed " << seed;
        for (auto& choice : plain) std::get<2>(choice) = 0;
        auto unhosted = asTuples(mapped.choicesOf(draw.there[i]));
        for (auto& choice : unhosted) std::get<2>(choice) = 0;
        ASSERT_EQ(unhosted, plain) << "seed " << seed;
      }
    }
  }
}

TEST(TokenLists, AgreeWithThePlainDefinition) {
  for (unsigned seed = 0; seed < kDraws; ++seed) {
    Draw draw(seed);
    const HostTable hosts(draw.hosts->split(draw.there));
    const auto chosen = draw.table();
    const TokenLists byHost(chosen, draw.topk, hostsOfExperts(*draw.experts, hosts), hosts.size());
    for (size_t h = 0; h < hosts.size(); ++h) {
      ASSERT_EQ(asVector(byHost.of(h)),
                plainTokensFor(chosen, draw.topk, *draw.experts, hosts.hosts()[h]))
          << "seed " << seed;
    }
    const TokenLists byRank(chosen, draw.topk, draw.experts->owners(), size_t(draw.numRanks));
    for (int r = 0; r < draw.numRanks; ++r) {
      ASSERT_EQ(asVector(byRank.of(size_t(r))),
                plainTokensFor(chosen, draw.topk, *draw.experts, {r}))
          << "seed " << seed;
    }
  }
}

TEST(HostTable, AgreesWithThePlainDefinition) {
  for (unsigned seed = 0; seed < kDraws; ++seed) {
    Draw draw(seed);
    const auto split = draw.hosts->split(draw.there);
    const auto table = draw.hosts->tableOf(draw.there);
    ASSERT_EQ(table->hosts(), split);
    for (int r = 0; r < draw.numRanks; ++r) {
      const auto at = std::ranges::find_if(
          split, [&](const auto& host) { return std::ranges::find(host, r) != host.end(); });
      ASSERT_EQ(table->indexOf(r), at == split.end() ? HostTable::kNoHost : at - split.begin());
      if (at != split.end()) ASSERT_EQ(table->hostOf(r), *at);
      for (size_t h = 0; h < split.size(); ++h) {
        const auto count = std::ranges::count_if(
            draw.there, [&](int other) { return other < r && table->indexOf(other) != int(h); });
        ASSERT_EQ(table->countBelow(r, h), size_t(count)) << "seed " << seed;
      }
    }
  }
}

TEST(ExpertMap, ListsTheExpertsOfARank) {
  for (unsigned seed = 0; seed < kDraws; ++seed) {
    Draw draw(seed);
    const ExpertMap& experts = *draw.experts;
    for (int r = 0; r < draw.numRanks; ++r) {
      std::vector<int> plain;
      for (int e = 0; e < experts.numExperts(); ++e) {
        if (experts.owner(e) == r) plain.push_back(e);
      }
      const auto listed = experts.expertsOf(r);
      ASSERT_EQ(std::vector<int>(listed.begin(), listed.end()), plain);
    }
  }
}

TEST(DispatchTable, IsEncodedOnceForAllReaders) {
  Draw draw(1);
  const Shape shape{.numRanks = draw.numRanks,
                    .numExperts = draw.experts->numExperts(),
                    .maxTokens = 20,
                    .hidden = 128};
  DispatchTable table{.tokens = 3, .topk = 2, .arenaOffset = 77, .mask = {0, 70}};
  table.experts = {0, kNoExpert, 0, 0, kNoExpert, kNoExpert};
  Bytes shared = table.encode(shape.numExperts);
  table.rowsAt = RowsAt::kWritten;
  table.packedRows = 3;
  table.packedOffset = uint64_t(1) << 40 | 5;
  DispatchTable::setRows(shared, table.rowsAt, table.packedRows, table.packedOffset);
  EXPECT_EQ(shared, table.encode(shape.numExperts));

  uint32_t length = 0;
  std::memcpy(&length, shared.data(), sizeof(length));
  const auto body = std::span(shared).subspan(sizeof(length), length - sizeof(length));
  const auto decoded = DispatchTable::decode(body, shape);
  ASSERT_TRUE(decoded.ok()) << decoded.error().message;
  EXPECT_EQ(decoded->experts, table.experts);
  EXPECT_EQ(decoded->arenaOffset, table.arenaOffset);
  EXPECT_EQ(decoded->rowsAt, table.rowsAt);
  EXPECT_EQ(decoded->packedRows, table.packedRows);
  EXPECT_EQ(decoded->packedOffset, table.packedOffset);
  EXPECT_EQ(decoded->mask, table.mask);
  for (size_t less = 1; less <= body.size(); ++less)
    EXPECT_FALSE(DispatchTable::decode(body.first(body.size() - less), shape).ok()) << less;
}

TEST(DispatchTable, OfMoreEntriesThanItHoldsIsRefused) {
  // 2^32 entries of two bytes: the number of bytes must not wrap around.
  const Bytes words = ByteWriter()
                          .put(uint32_t(1) << 31)
                          .put(uint32_t(1) << 31)
                          .put(uint64_t(0))
                          .put(uint8_t(0))
                          .put(uint32_t(0))
                          .put(uint64_t(0))
                          .put(uint32_t(0))
                          .take();
  const Shape shape{.numRanks = 2, .numExperts = 4, .maxTokens = ~size_t(0), .hidden = 128};
  EXPECT_FALSE(DispatchTable::decode(words, shape).ok());
}

TEST(CombineTable, IsEncodedOnceForAllReaders) {
  CombineTable table{.dispatch = 9,
                     .arenaOffset = 1,
                     .regionOffset = 2,
                     .regionRowBytes = 256,
                     .localExperts = 1,
                     .mask = {0, 1},
                     .ranges = {{1, 2}, {3, 4}}};
  Bytes shared = table.encode();
  table.rowsAt = RowsAt::kPayload;
  CombineTable::setRowsAt(shared, table.rowsAt);
  EXPECT_EQ(shared, table.encode());
}

}  // namespace
}  // namespace mooncake::ep
