#include "base/bytes.h"

#include <algorithm>
#include <array>
#include <gtest/gtest.h>
#include <limits>
#include <random>

namespace mooncake {
namespace {

TEST(Bytes, WhatIsWrittenIsRead) {
  ByteWriter writer;
  const std::array<std::byte, 3> raw = {std::byte(1), std::byte(2), std::byte(3)};
  writer.put(uint8_t(7)).put(int16_t(-2)).put(std::numeric_limits<uint64_t>::max()).put(true);
  writer.putString("hello").putBytes(raw).putRaw(raw).putString("");

  ByteReader reader(writer.bytes());
  EXPECT_EQ(reader.get<uint8_t>(), 7);
  EXPECT_EQ(reader.get<int16_t>(), -2);
  EXPECT_EQ(reader.get<uint64_t>(), std::numeric_limits<uint64_t>::max());
  EXPECT_TRUE(reader.get<bool>());
  EXPECT_EQ(reader.getString(5), "hello");
  EXPECT_TRUE(std::ranges::equal(reader.getBytes(3), raw));
  EXPECT_TRUE(std::ranges::equal(reader.getRaw(3), raw));
  EXPECT_EQ(reader.getString(0), "");
  EXPECT_TRUE(reader.finish("test").ok());
}

TEST(Bytes, IntegersAreLittleEndian) {
  const Bytes bytes = ByteWriter().put(uint32_t(0x01020304)).take();
  EXPECT_EQ(bytes, (Bytes{std::byte(4), std::byte(3), std::byte(2), std::byte(1)}));
}

TEST(Bytes, AFailureIsRemembered) {
  const Bytes bytes = ByteWriter().put(uint16_t(1)).put(uint8_t(9)).take();
  ByteReader reader(bytes);
  EXPECT_EQ(reader.get<uint32_t>(), 0u);
  EXPECT_EQ(reader.get<uint8_t>(), 0u)
      << "a field after the failure must not be read from the wrong place";
  EXPECT_TRUE(reader.failed());
  EXPECT_EQ(reader.finish("hello").code(), ErrorCode::kProtocol);
}

TEST(Bytes, LeftoversAreAnError) {
  const Bytes bytes = ByteWriter().put(uint16_t(1)).take();
  ByteReader reader(bytes);
  reader.get<uint8_t>();
  EXPECT_FALSE(reader.failed());
  const Status status = reader.finish("hello");
  EXPECT_EQ(status.code(), ErrorCode::kProtocol);
  EXPECT_NE(status.error().message.find("hello"), std::string::npos);
}

TEST(Bytes, LengthsAreBounded) {
  const Bytes tooLong = ByteWriter().putString("hello").take();
  ByteReader bounded(tooLong);
  EXPECT_EQ(bounded.getString(4), "");
  EXPECT_TRUE(bounded.failed());

  const Bytes lying = ByteWriter().put(uint32_t(0xffffffff)).put(uint8_t(1)).take();
  ByteReader reader(lying);
  EXPECT_TRUE(reader.getBytes(std::numeric_limits<size_t>::max()).empty());
  EXPECT_TRUE(reader.failed());
}

TEST(Bytes, ABoolIsZeroOrOne) {
  const Bytes bytes = ByteWriter().put(uint8_t(2)).take();
  ByteReader reader(bytes);
  EXPECT_FALSE(reader.get<bool>());
  EXPECT_TRUE(reader.failed());
}

// Random calls on random bytes: never outside the input (the address sanitizer watches: each input
// is a heap block of exactly its size), never more out than in, never back from failure.
TEST(Bytes, FuzzedReader) {
  std::mt19937 random(20260101);
  for (int round = 0; round < 20000; ++round) {
    Bytes input(random() % 40);
    // Small numbers, so that many lengths are plausible.
    for (auto& byte : input) byte = std::byte(random() % 8 < 6 ? random() % 4 : random() % 256);
    ByteReader reader(input);
    unsigned checksum = 0;
    for (int field = 0; field < 12; ++field) {
      const size_t before = reader.left();
      const bool failedBefore = reader.failed();
      size_t got = 0;
      switch (random() % 6) {
        case 0:
          reader.get<uint8_t>();
          break;
        case 1:
          reader.get<uint64_t>();
          break;
        case 2:
          reader.get<bool>();
          break;
        case 3:
          got = reader.getString(random() % 16).size();
          break;
        case 4:
          for (const std::byte byte : reader.getBytes(random() % 64))
            checksum += std::to_integer<unsigned>(byte), ++got;
          break;
        case 5:
          for (const std::byte byte : reader.getRaw(random() % 16))
            checksum += std::to_integer<unsigned>(byte), ++got;
          break;
      }
      ASSERT_LE(reader.left() + got, before);
      ASSERT_TRUE(reader.failed() || !failedBefore);
      ASSERT_TRUE(!reader.failed() || reader.left() == 0);
    }
    ASSERT_LE(checksum, input.size() * 255);
    ASSERT_EQ(reader.finish("fuzz").ok(), !reader.failed() && reader.left() == 0);
  }
}

TEST(CopyPastCache, CopiesEveryByteAndNoMoreAtAnyAlignment) {
  Bytes source(4 * 64), target(source.size());
  for (size_t i = 0; i < source.size(); ++i) source[i] = std::byte(i + 1);
  for (size_t from = 0; from < 17; ++from) {
    for (size_t to = 0; to < 65; ++to) {
      for (const size_t length : {0, 1, 63, 64, 65, 127, 128, 150}) {
        std::fill(target.begin(), target.end(), std::byte(0));
        copyPastCache(target.data() + to, {source.data() + from, length});
        for (size_t i = 0; i < target.size(); ++i) {
          const bool copied = i >= to && i < to + length;
          ASSERT_EQ(target[i], copied ? source[from + i - to] : std::byte(0))
              << "from " << from << " to " << to << " length " << length << " at " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace mooncake
