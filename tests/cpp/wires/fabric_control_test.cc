#include <functional>
#include <gtest/gtest.h>
#include <random>

#include "wires/cards/control.h"

// Control messages between the ends of a fabric channel, from a peer that may send anything.
namespace mooncake::control {
namespace {

Grant someGrant() {
  return {.region = 7,
          .rights = 3,
          .bytes = 300,
          .cards = {{{0, 100, {11, 0}}, {100, 200, {12, 4096}}}, {}, {{0, 300, {13, 0}}}}};
}

// A message of each kind: encoded, and a function that decodes bytes and encodes the result again.
struct Sample {
  Bytes right;
  std::function<std::optional<Bytes>(ByteView)> again;
};

template <typename What>
Sample sampleOf(const What& what) {
  return {what.encode(), [](ByteView bytes) -> std::optional<Bytes> {
            const auto decoded = What::decode(bytes);
            if (!decoded.ok()) return std::nullopt;
            return decoded->encode();
          }};
}

std::vector<Sample> samples() {
  return {
      sampleOf(Hello{.incarnation = 5,
                     .packetBytes = 8192,
                     .rails = {{"eth1", "tcp;ofi_rxm", Bytes(16)}, {"eth2", "sim", Bytes(8)}}}),
      sampleOf(Fenced{{1, 2, 3}}),
      sampleOf(State{.question = 1, .below = 2, .above = {4, 6}}),
      sampleOf(someGrant()),
      sampleOf(Card{.index = 3, .address = Bytes(16)}),
      sampleOf(Retire{.ticket = 1, .region = 2, .card = 3}),
      sampleOf(Fetch{{{1, 2, 3, 4, 5, 6}, {7, 8, 9, 10, 11, 12}}}),
      sampleOf(Fetched{{{.number = 1}, {.number = 2, .missing = {{3, 4}, {5, 6}}}}}),
  };
}

TEST(FabricControlTest, WhatWasEncodedDecodesAndWhatIsCutOffDoesNot) {
  for (const Sample& sample : samples()) {
    const ByteView fields = ByteView(sample.right).subspan(1);  // after the kind
    EXPECT_EQ(sample.again(fields), sample.right);
    for (size_t bytes = 0; bytes < fields.size(); ++bytes)
      EXPECT_EQ(sample.again(fields.first(bytes)), std::nullopt) << bytes;
  }
}

TEST(FabricControlTest, WhatDecodesIsWhatWouldBeEncoded) {
  std::minstd_rand random(20261122);
  for (const Sample& sample : samples()) {
    for (int round = 0; round < 20000; ++round) {
      Bytes bytes = sample.right;
      for (size_t i = random() % 4; i-- > 0;)
        bytes[1 + random() % (bytes.size() - 1)] = std::byte(random());
      const auto again = sample.again(ByteView(bytes).subspan(1));
      if (again) {
        EXPECT_EQ(again->size(), bytes.size());
      }
    }
  }
}

TEST(FabricControlTest, AGrantIsAllOfTheRegionOrNothing) {
  const auto decodes = [](const Grant& grant) {
    return Grant::decode(ByteView(grant.encode()).subspan(1)).ok();
  };
  EXPECT_TRUE(decodes(someGrant()));
  std::vector<std::function<void(Grant&)>> spoil = {
      [](Grant& grant) { grant.cards[0][0].offset = 1; },            // begins too late
      [](Grant& grant) { grant.cards[0][1].offset = 99; },           // overlaps
      [](Grant& grant) { grant.cards[0][1].offset = 101; },          // a gap
      [](Grant& grant) { grant.cards[0][1].bytes = 199; },           // ends too early
      [](Grant& grant) { grant.cards[0][1].bytes = 201; },           // reaches beyond
      [](Grant& grant) { grant.cards[0][1].bytes = ~uint64_t(0); },  // wraps around
      [](Grant& grant) { grant.cards[0][0].bytes = 0; },
      [](Grant& grant) { grant.bytes = 0; },
      [](Grant& grant) { grant.cards.resize(kMostRails + 1); },
  };
  for (size_t i = 0; i < spoil.size(); ++i) {
    Grant grant = someGrant();
    spoil[i](grant);
    EXPECT_FALSE(decodes(grant)) << i;
  }
}

TEST(FabricControlTest, NoMoreIsFetchedAtOnceThanOneMessageHolds) {
  const auto decodes = [](const auto& what) {
    return std::decay_t<decltype(what)>::decode(ByteView(what.encode()).subspan(1)).ok();
  };
  Fetch fetch{std::vector<Fetch::One>(kMostFetches, {.number = 1})};
  Fetched fetched{std::vector<Fetched::One>(kMostFetches)};
  for (auto& one : fetched.ones) one.missing.resize(kMostParts);
  EXPECT_TRUE(decodes(fetch) && decodes(fetched));
  EXPECT_LE(std::max(fetch.encode().size(), fetched.encode().size()), size_t(64) << 10);
  fetch.ones.push_back({.number = 1});
  EXPECT_FALSE(decodes(fetch));
  EXPECT_FALSE(decodes(Fetch{{{.number = 0}}}));  // no answer could be told from another one
  fetched.ones.back().missing.emplace_back();
  EXPECT_FALSE(decodes(fetched));
  fetched.ones.back().missing.clear();
  fetched.ones.emplace_back();
  EXPECT_FALSE(decodes(fetched));
}

TEST(FabricControlTest, WhatIsMissingIsToldWholeWithFewParts) {
  Fetched::One one;
  for (const uint64_t position : {40, 80, 20, 60}) one.miss({position, 10});
  ASSERT_EQ(one.missing.size(), kMostParts);
  one.miss({0, 5});
  ASSERT_EQ(one.missing.size(), 1u);
  EXPECT_EQ(one.missing[0].position, 0u);
  EXPECT_EQ(one.missing[0].bytes, 90u);
}

}  // namespace
}  // namespace mooncake::control
