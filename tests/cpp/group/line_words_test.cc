#include "group/line_words.h"

#include <gtest/gtest.h>
#include <random>

#include "membership/roster.h"

namespace mooncake {
namespace {

EngineId idOf(int number) {
  EngineId id{};
  id[0] = std::byte(number);
  id[15] = std::byte(255 - number);
  return id;
}

LineMessage prepare(std::vector<Newcomer> newcomers) {
  return {
      .kind = LineMessage::Kind::kPrepare,
      .wishes = true,
      .successor = {
          .series = 7, .newcomers = std::move(newcomers), .jobRanks = {0, 9, Roster::kNobody, 3}}};
}

LineMessage ready(std::vector<int> jobRanks) {
  return {.kind = LineMessage::Kind::kReady, .successor = {.jobRanks = std::move(jobRanks)}};
}

// Rank 3 is taken out of 5, and then seen no more.
LineMessage removal() {
  LineMessage message{.kind = LineMessage::Kind::kAsk};
  message.successor = {.series = 9, .absent = {1, 3}, .extent = 3, .retired = {1}};
  return message;
}

TEST(LineWords, ComeBackAsTheyWere) {
  for (const LineMessage& message :
       {ready({0, 5, 7, Roster::kNobody}), prepare({{.rank = 2, .id = idOf(2)}}),
        prepare({{.rank = 0, .id = idOf(9)}, {.rank = 3, .id = idOf(4)}}), removal()}) {
    const auto read = decodeLineMessage(encodeLineMessage(message), 4);
    ASSERT_TRUE(read.ok()) << read.error().message;
    EXPECT_EQ(*read, message);
  }
}

TEST(LineWords, AreRefusedOutsideOfTheGroup) {
  const Bytes outside = encodeLineMessage(prepare({{.rank = 4, .id = idOf(1)}}));
  EXPECT_EQ(decodeLineMessage(outside, 4).status().code(), ErrorCode::kProtocol);
  LineMessage larger = prepare({{.rank = 4, .id = idOf(1)}});
  larger.successor.jobRanks.push_back(4);
  EXPECT_TRUE(decodeLineMessage(encodeLineMessage(larger), 5).ok());
  LineMessage message = removal();
  message.successor.retired = {1, 4};
  EXPECT_FALSE(decodeLineMessage(encodeLineMessage(message), 4).ok());
  message = removal();
  message.successor.extent = 5;
  EXPECT_FALSE(decodeLineMessage(encodeLineMessage(message), 4).ok());
}

TEST(LineWords, NameARankOfTheJobForEachPlace) {
  for (const std::vector<int>& jobRanks :
       {std::vector<int>{}, {0, 1, 2}, {0, 1, 2, 3, 4}, {0, 1, 2, -2}, {0, 1, 2, JobRanks::kLimit}})
    EXPECT_FALSE(decodeLineMessage(encodeLineMessage(ready(jobRanks)), 4).ok());
  EXPECT_TRUE(decodeLineMessage(encodeLineMessage(ready({3, 2, 1, 0})), 4).ok());
  LineMessage message = removal();  // asked for by a member: it names none
  EXPECT_TRUE(decodeLineMessage(encodeLineMessage(message), 4).ok());
  message.successor.jobRanks = {0, 1};
  EXPECT_FALSE(decodeLineMessage(encodeLineMessage(message), 4).ok());
}

TEST(LineWords, AreRefusedOutOfOrderOrTwice) {
  const Newcomer one{.rank = 1, .id = idOf(1)}, two{.rank = 2, .id = idOf(2)};
  EXPECT_FALSE(decodeLineMessage(encodeLineMessage(prepare({two, one})), 4).ok());
  EXPECT_FALSE(decodeLineMessage(encodeLineMessage(prepare({one, one})), 4).ok());
  LineMessage message = removal();
  message.successor.absent = {3, 1};
  EXPECT_FALSE(decodeLineMessage(encodeLineMessage(message), 4).ok());
  message = removal();
  message.successor.retired = {1, 1};
  EXPECT_FALSE(decodeLineMessage(encodeLineMessage(message), 4).ok());
}

TEST(LineWords, AreRefusedCutOffOrTooLong) {
  Bytes bytes = encodeLineMessage(prepare({{.rank = 2, .id = idOf(2)}}));
  for (size_t length = 0; length < bytes.size(); ++length)
    EXPECT_FALSE(decodeLineMessage(ByteView(bytes).first(length), 4).ok()) << length;
  bytes.push_back({});
  EXPECT_FALSE(decodeLineMessage(bytes, 4).ok());
}

// A count says nothing about the bytes that are there.
TEST(LineWords, SurviveRandomBytes) {
  std::minstd_rand random(3);
  const Bytes good = encodeLineMessage(prepare({{.rank = 1, .id = idOf(1)}}));
  for (int i = 0; i < 20000; ++i) {
    Bytes bytes = good;
    for (int n = int(random() % 4); n >= 0; --n)
      bytes[random() % bytes.size()] = std::byte(random());
    const auto read = decodeLineMessage(bytes, 4);
    if (read.ok()) EXPECT_EQ(encodeLineMessage(*read), bytes);
  }
}

TEST(LineWords, SuccessorsThatDifferHaveDifferentNames) {
  const Successor one{.series = 2, .newcomers = {{.rank = 1, .id = idOf(1)}}};
  Successor other = one;
  EXPECT_EQ(one.identity("line"), other.identity("line"));
  EXPECT_NE(one.identity("line"), one.identity("lane"));
  other.newcomers[0].id = idOf(3);
  EXPECT_NE(one.identity("line"), other.identity("line"));
  other = one;
  other.series = 3;
  EXPECT_NE(one.identity("line"), other.identity("line"));
}

}  // namespace
}  // namespace mooncake
