// Packets between cards, and their assembly on arrival.
#include <algorithm>
#include <functional>
#include <pthread.h>
#include <random>

#include "engine_side.h"
#include "wires/packets/incoming.h"

namespace mooncake::testing {
namespace {

Bytes encoded(const Packet& packet, ByteView data = {}) {
  Bytes bytes(Packet::kBytes);
  packet.encode(std::span<std::byte, Packet::kBytes>(bytes.data(), Packet::kBytes));
  bytes.insert(bytes.end(), data.begin(), data.end());
  return bytes;
}

bool isRefused(const Packet& packet, ByteView data = {}) {
  const Bytes bytes = encoded(packet, data);
  ByteReader in(bytes);
  const auto read = Packet::decode(in);
  return !read.ok() && read.error().code == ErrorCode::kProtocol;
}

Packet somePut() {
  return {.kind = Packet::Kind::kPut,
          .incarnation = 7,
          .serial = 3,
          .acked = 2,
          .number = 5,
          .key = 2,
          .offset = 128,
          .length = 30,
          .position = 20,
          .signal = {64, 5},
          .signalKey = 3,
          .after = 4};
}

TEST(PacketTest, IsReadAsItWasWritten) {
  const Bytes data = pattern(10, 1), bytes = encoded(somePut(), data);
  ByteReader in(bytes);
  const auto read = Packet::decode(in);
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(encoded(*read), encoded(somePut()));
  EXPECT_EQ(read->after, 4u);
  EXPECT_EQ(read->signalKey, 3u);
  EXPECT_EQ(in.left(), data.size());
}

TEST(PacketTest, WhatItDoesNotWriteIsRefused) {
  const Bytes data = pattern(10, 1);
  EXPECT_FALSE(isRefused(somePut(), data));
  const auto changed = [&](auto&& change) {
    Packet packet = somePut();
    change(packet);
    return isRefused(packet, data);
  };
  EXPECT_TRUE(changed([](Packet& p) { p.position = 21; })) << "data behind the end";
  EXPECT_TRUE(changed([](Packet& p) { p.position = ~uint64_t(0); }));
  EXPECT_TRUE(changed([](Packet& p) { p.signal.offset = 65; }));
  EXPECT_TRUE(changed([](Packet& p) { p.signal.offset = 0; })) << "the doorbell";
  EXPECT_TRUE(changed([](Packet& p) { p.kind = Packet::Kind(9); }));
  EXPECT_TRUE(changed([](Packet& p) { p.kind = Packet::Kind(0); }));
  EXPECT_TRUE(changed([](Packet& p) { p.status = Packet::Status(3); }));
  EXPECT_TRUE(changed([](Packet& p) { p.serial = 0; }));
  EXPECT_TRUE(changed([](Packet& p) { p.after = 5; })) << "waits for itself";
  EXPECT_TRUE(changed([](Packet& p) { p.length = (64 << 20) + 1; }));
  EXPECT_TRUE(isRefused(somePut())) << "an empty piece of something";
  EXPECT_TRUE(isRefused({.kind = Packet::Kind::kAck}, data)) << "no whole numbers";
  EXPECT_TRUE(isRefused({.kind = Packet::Kind::kAck, .signalKey = 1})) << "no word";
  EXPECT_TRUE(isRefused({.kind = Packet::Kind::kProbe, .serial = 1}));
  const Bytes good = encoded(somePut(), data);
  for (size_t bytes = 0; bytes < Packet::kBytes; ++bytes) {
    ByteReader half(ByteView(good).first(bytes));
    EXPECT_FALSE(Packet::decode(half).ok());
  }
  for (const size_t at : {0, 1, 2}) {
    Bytes bad = good;
    bad[at] ^= std::byte{0x40};
    ByteReader in(bad);
    EXPECT_FALSE(Packet::decode(in).ok()) << "mark and version";
  }
}

TEST(SerialsTest, EachComesOnce) {
  Serials serials;
  EXPECT_FALSE(serials.add(0));
  EXPECT_TRUE(serials.add(2));
  EXPECT_FALSE(serials.add(2));
  EXPECT_EQ(serials.below(), 1u);
  EXPECT_TRUE(serials.add(4));
  EXPECT_TRUE(serials.add(1));
  EXPECT_EQ(serials.below(), 3u);
  EXPECT_TRUE(serials.has(4));
  EXPECT_FALSE(serials.has(3));
  EXPECT_TRUE(serials.add(3));
  EXPECT_EQ(serials.below(), 5u);
  EXPECT_TRUE(serials.above().empty());
  EXPECT_FALSE(serials.add(5 + Serials::kMostAhead)) << "nobody makes us remember that";
  EXPECT_TRUE(serials.add(4 + Serials::kMostAhead));
}

// Runs `work` on a thread with a stack of 512 KiB. Recursion for each put would need several MiB.
void runOnASmallStack(const std::function<void()>& work) {
  pthread_attr_t attributes;
  ASSERT_EQ(::pthread_attr_init(&attributes), 0);
  ASSERT_EQ(::pthread_attr_setstacksize(&attributes, size_t(512) << 10), 0);
  pthread_t thread;
  const auto run = [](void* argument) -> void* {
    (*static_cast<const std::function<void()>*>(argument))();
    return nullptr;
  };
  ASSERT_EQ(::pthread_create(&thread, &attributes, run,
                             const_cast<void*>(static_cast<const void*>(&work))),
            0);
  ::pthread_join(thread, nullptr);
  ::pthread_attr_destroy(&attributes);
}

class IncomingTest : public ::testing::Test {
 protected:
  // Returns a put of `bytes` in pieces, to offset 4096 of the part.
  std::vector<std::pair<Packet, Bytes>> putOf(const Part& part, uint64_t number, size_t bytes,
                                              uint64_t stamp, uint64_t after, size_t piece) {
    const Bytes data = pattern(bytes, number);
    std::vector<std::pair<Packet, Bytes>> pieces;
    for (size_t at = 0; at < bytes; at += piece) {
      Packet packet{.kind = Packet::Kind::kPut,
                    .serial = 1,
                    .number = number,
                    .key = part.remote().key,
                    .offset = 4096,
                    .length = bytes,
                    .position = at,
                    .signal = {64, stamp},
                    .after = after};
      const size_t length = std::min(piece, bytes - at);
      pieces.push_back({packet, Bytes(data.begin() + at, data.begin() + at + length)});
    }
    return pieces;
  }

  EngineSide side;
  Incoming incoming{side.regions()};
};

TEST_F(IncomingTest, PutsWithOneWordLandOneAfterTheOther) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 50; ++round) {
    auto part = side.part(1 << 16);
    Incoming one(side.regions());
    std::vector<std::pair<Packet, Bytes>> pieces;
    for (uint64_t number = 1; number <= 6; ++number) {
      for (auto& piece : putOf(part, number, 5000, number, number - 1, 700))
        pieces.push_back(std::move(piece));
    }
    std::shuffle(pieces.begin(), pieces.end(), random);
    uint64_t landed = 0;
    for (const auto& [packet, data] : pieces) {
      ASSERT_TRUE(one.hasRoomFor(packet, data.size()));
      one.put(packet, data);
      const uint64_t stamp = part.word(64).load();
      EXPECT_GE(stamp, landed);
      // Between two stamps the next put may be there in part. At its stamp a put is complete.
      if (stamp > landed && stamp == 6) {
        EXPECT_TRUE(part.holds(4096, pattern(5000, 6)));
      }
      landed = stamp;
    }
    EXPECT_EQ(landed, 6u);
    EXPECT_EQ(one.bad(), 0u);
  }
}

TEST_F(IncomingTest, NothingOfALaterPutLandsBeforeTheEarlierOneIsWhole) {
  auto part = side.part(1 << 16);
  const auto first = putOf(part, 1, 2000, 1, 0, 1000), second = putOf(part, 2, 2000, 2, 1, 1000);
  incoming.put(second[0].first, second[0].second);
  incoming.put(second[1].first, second[1].second);
  EXPECT_TRUE(part.isZero(4096, 2000));
  incoming.put(first[1].first, first[1].second);
  EXPECT_EQ(part.word(64).load(), 0u);
  incoming.put(first[0].first, first[0].second);
  EXPECT_EQ(part.word(64).load(), 2u);
  EXPECT_TRUE(part.holds(4096, pattern(2000, 2)));
}

// A put that is late, or out of bounds, does not hold up the next one.
TEST_F(IncomingTest, APutThatIsDroppedLetsTheNextOneLand) {
  auto part = side.part(1 << 16);
  part.word(64).store(1);
  const auto late = putOf(part, 1, 2000, 1, 0, 1000), next = putOf(part, 2, 2000, 2, 1, 1000);
  for (const auto& [packet, data] : late) incoming.put(packet, data);
  EXPECT_TRUE(part.isZero(4096, 2000));
  for (const auto& [packet, data] : next) incoming.put(packet, data);
  EXPECT_TRUE(part.holds(4096, pattern(2000, 2)));
}

// Each put waits for the one before it, and the first one comes last.
TEST_F(IncomingTest, AChainOfEmptyPutsLandsWhateverItsLength) {
  constexpr uint64_t kCount = Serials::kMostAhead - 1;
  auto part = side.part(1 << 16);
  Packet put{.kind = Packet::Kind::kPut, .serial = 1, .key = part.remote().key, .offset = 4096};
  for (uint64_t number = kCount; number > 1; --number) {
    put.number = number;
    put.signal = {64, number};
    put.after = number - 1;
    ASSERT_TRUE(incoming.hasRoomFor(put, 0)) << number;
    incoming.put(put, {});
  }
  put.number = 1;
  put.signal = {64, 1};
  put.after = 0;
  runOnASmallStack([&] { incoming.put(put, {}); });
  EXPECT_EQ(part.word(64).load(), kCount);
  EXPECT_EQ(incoming.bad(), 0u);
}

// A waiting piece takes memory, even without data, and even if its number is known already.
TEST_F(IncomingTest, EmptyPutsThatWaitAreHeldWithinABound) {
  constexpr size_t kMost = (size_t(64) << 20) / Packet::kBytes;
  auto part = side.part(1 << 16);
  const Packet put{.kind = Packet::Kind::kPut,
                   .serial = 1,
                   .number = 2,
                   .key = part.remote().key,
                   .offset = 4096,
                   .signal = {64, 2},
                   .after = 1};
  size_t held = 0;
  for (; held < kMost && incoming.hasRoomFor(put, 0); ++held) incoming.put(put, {});
  EXPECT_LT(held, kMost);
  EXPECT_GT(held, Serials::kMostAhead) << "as many as may be on their way";
  Packet first = put;
  first.number = 1;
  first.signal.stamp = 1;
  first.after = 0;
  incoming.put(first, {});
  EXPECT_EQ(part.word(64).load(), 2u);
  EXPECT_EQ(incoming.bad(), held - 1) << "a put lands once";
  EXPECT_TRUE(incoming.hasRoomFor(put, size_t(32) << 20)) << "what was held is free again";
}

TEST_F(IncomingTest, PiecesThatDoNotFitAreCountedAndDropped) {
  auto part = side.part(1 << 16);
  auto pieces = putOf(part, 1, 2000, 1, 0, 1000);
  incoming.put(pieces[0].first, pieces[0].second);
  Packet other = pieces[1].first;
  other.offset += 8;
  incoming.put(other, pieces[1].second);
  other = pieces[1].first;
  other.length += 1000;
  incoming.put(other, pieces[1].second);
  EXPECT_EQ(incoming.bad(), 2u);
  EXPECT_TRUE(part.isZero(5096, 3000));
  incoming.put(pieces[1].first, pieces[1].second);
  EXPECT_EQ(part.word(64).load(), 1u);
  incoming.put(pieces[1].first, pieces[1].second);
  EXPECT_EQ(incoming.bad(), 3u) << "it has landed";
}

TEST_F(IncomingTest, AWriteEndsWithItsLastByteOrWhereItWasCut) {
  auto part = side.part(1 << 16);
  const Bytes data = pattern(2000, 3);
  Packet piece{.kind = Packet::Kind::kWrite,
               .serial = 1,
               .number = 1,
               .key = part.remote().key,
               .offset = 8192,
               .length = 2000};
  piece.position = 1000;
  EXPECT_FALSE(incoming.write(piece, ByteView(data).subspan(1000)));
  piece.position = 0;
  EXPECT_EQ(incoming.write(piece, ByteView(data).first(1000)), Packet::Status::kOk);
  EXPECT_TRUE(part.holds(8192, data));

  Packet cut = piece;
  cut.number = piece.number = 2;
  cut.status = Packet::Status::kAborted;
  cut.position = 1000;  // bytes that have left
  EXPECT_FALSE(incoming.write(cut, {}));
  EXPECT_FALSE(incoming.write(piece, ByteView(data).first(1000)));
  // The write is forgotten: its number begins a new one.
  EXPECT_FALSE(incoming.write(piece, ByteView(data).first(1000)));
  piece.position = 1000;
  EXPECT_EQ(incoming.write(piece, ByteView(data).subspan(1000)), Packet::Status::kOk);

  piece.number = 3;
  piece.position = 0;
  piece.offset = (1 << 16) - 1999;
  EXPECT_FALSE(incoming.write(piece, ByteView(data).first(1000)));
  EXPECT_TRUE(part.isZero((1 << 16) - 1999, 1000)) << "not even the part inside";
  piece.position = 1000;
  EXPECT_EQ(incoming.write(piece, ByteView(data).subspan(1000)), Packet::Status::kRefused);
}

}  // namespace
}  // namespace mooncake::testing
