#include "engine/peers/last_words.h"

#include <gtest/gtest.h>
#include <string>

#include "engine_side.h"

namespace mooncake::test {
namespace {

using namespace std::chrono_literals;
using mooncake::testing::bytesOf;

constexpr auto kKept = 100ms;
constexpr Clock::time_point kNow{};

EngineId idOf(int number) {
  EngineId id{};
  id[0] = std::byte(number);
  return id;
}

class LastWordsTest : public ::testing::Test {
 protected:
  // "topic:message" of each word, in order.
  std::string repeat(int peer, Clock::time_point now) {
    std::string all;
    for (const auto& [topic, message] : words_.repeat(idOf(peer), now)) {
      all += (all.empty() ? "" : " ") + std::to_string(topic) + ":";
      for (const std::byte character : message) all += char(character);
    }
    return all;
  }

  LastWords words_{kKept};
};

TEST_F(LastWordsTest, EachPeerHearsItsOwnInOrder) {
  words_.keep({idOf(1), idOf(2)}, 7, {bytesOf("left"), bytesOf("ended")}, kNow);
  words_.keep({idOf(2)}, 8, {bytesOf("bye")}, kNow);
  EXPECT_EQ(repeat(1, kNow), "7:left 7:ended");
  EXPECT_EQ(repeat(2, kNow), "7:left 7:ended 8:bye");
  EXPECT_EQ(repeat(3, kNow), "");
}

TEST_F(LastWordsTest, TheyAreForgottenAWhileAfterTheyWereSent) {
  words_.keep({idOf(1)}, 7, {bytesOf("left")}, kNow);
  words_.keep({idOf(1)}, 8, {bytesOf("bye")}, kNow + kKept / 2);
  EXPECT_EQ(repeat(1, kNow + kKept), "8:bye");
  EXPECT_EQ(repeat(1, kNow + 2 * kKept), "");
}

// The connection may break again before the repetition has arrived.
TEST_F(LastWordsTest, TheyAreKeptAnewWhenTheyAreRepeated) {
  words_.keep({idOf(1)}, 7, {bytesOf("left")}, kNow);
  words_.keep({idOf(2)}, 8, {bytesOf("bye")}, kNow);
  EXPECT_EQ(repeat(1, kNow + kKept / 2), "7:left");
  EXPECT_EQ(repeat(1, kNow + kKept), "7:left");
  EXPECT_EQ(repeat(2, kNow + kKept), "") << "another peer's reconnection says nothing of this one";
  EXPECT_EQ(repeat(1, kNow + 2 * kKept), "");
}

TEST_F(LastWordsTest, TheOldestMakeRoom) {
  const size_t half = LastWords::kMostBytes / 2;
  words_.keep({idOf(1)}, 1, {Bytes(half)}, kNow);
  words_.keep({idOf(1)}, 2, {bytesOf("small")}, kNow);
  words_.keep({idOf(1)}, 3, {Bytes(half)}, kNow);
  const auto kept = words_.repeat(idOf(1), kNow);
  ASSERT_EQ(kept.size(), 2u);
  EXPECT_EQ(kept[0].topic, 2u);
  EXPECT_EQ(kept[1].topic, 3u);
}

}  // namespace
}  // namespace mooncake::test
