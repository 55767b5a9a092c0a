// Packets that are not acknowledged yet, and the paths over which they are sent again.
#include "wires/packets/sent_packets.h"

#include <gtest/gtest.h>

namespace mooncake::testing {
namespace {

class SentPacketsTest : public ::testing::Test {
 protected:
  void SetUp() override { paths.reset(kPaths); }

  void send(uint64_t serial, size_t path, int millisecond = 0) {
    sent.add(serial, {.path = path}, at(millisecond));
  }
  Clock::time_point at(int millisecond) const {
    return now + std::chrono::milliseconds(millisecond);
  }
  // Sends all waiting packets, as the channel does. Returns the number of packets for each path.
  std::vector<size_t> sendAgain() {
    std::vector<size_t> counts(kPaths);
    for (uint64_t from = 0;;) {
      const auto serial = sent.firstWaiting(from);
      if (!serial) return counts;
      const auto path = paths.choose(turn++);
      if (!path) return counts;
      sent.moveTo(*path, *serial, now);
      ++counts[*path];
      from = *serial + 1;
    }
  }
  std::vector<uint64_t> serials() const {
    std::vector<uint64_t> all;
    for (const auto& [serial, one] : sent) all.push_back(serial);
    return all;
  }

  static constexpr size_t kPaths = 4;
  const Clock::time_point now = Clock::now();
  Paths paths{std::chrono::milliseconds(100)};
  SentPackets sent{paths};
  uint64_t turn = 0;
};

TEST_F(SentPacketsTest, StayUntilTheyAreAcknowledged) {
  for (uint64_t serial = 1; serial <= 8; ++serial) send(serial, serial % kPaths);
  sent.acknowledge(3, {5, 8, 5, 99}, now);
  EXPECT_EQ(serials(), (std::vector<uint64_t>{3, 4, 6, 7}));
  sent.acknowledge(2, {}, now);
  EXPECT_EQ(sent.size(), 4u);
  EXPECT_TRUE(paths.hasWork());
  sent.acknowledge(8, {}, now);
  EXPECT_TRUE(sent.empty());
  EXPECT_FALSE(paths.hasWork());
}

TEST_F(SentPacketsTest, OfAPathThatIsLeftOutGoOverTheOthersEvenly) {
  for (uint64_t serial = 0; serial < 120; ++serial) send(serial, serial % kPaths);
  paths.leaveOut(1, now);
  sent.holdBack(1);
  EXPECT_EQ(sent.waiting(), 30u);
  EXPECT_EQ(sendAgain(), (std::vector<size_t>{10, 0, 10, 10}));
  EXPECT_EQ(sent.waiting(), 0u);
  // The next path fails. Its own packets, and those that had moved to it, are sent again.
  paths.leaveOut(2, now);
  sent.holdBack(2);
  EXPECT_EQ(sent.waiting(), 40u);
  EXPECT_EQ(sendAgain(), (std::vector<size_t>{20, 0, 0, 20}));
}

TEST_F(SentPacketsTest, WaitWhereNoPathIsUpAndAreAcknowledgedAllTheSame) {
  for (uint64_t serial = 0; serial < 8; ++serial) send(serial, serial % kPaths);
  for (size_t path = 0; path < kPaths; ++path) {
    paths.leaveOut(path, now);
    sent.holdBack(path);
  }
  EXPECT_EQ(sendAgain(), std::vector<size_t>(kPaths));
  EXPECT_EQ(sent.waiting(), 8u);
  sent.acknowledge(3, {6}, now);
  EXPECT_EQ(sent.waiting(), 4u);
  EXPECT_EQ(sent.firstWaiting(0), 3u);
  EXPECT_EQ(sent.firstWaiting(6), 7u);
  EXPECT_EQ(sent.firstWaiting(8), std::nullopt);
}

TEST_F(SentPacketsTest, ALostOneIsSentAgainThoughItsPathWorks) {
  send(0, 0);
  send(1, 1);
  uint64_t serial = 2;
  for (int millisecond = 10; millisecond < 300; millisecond += 10) {
    send(serial, 0, millisecond);
    sent.acknowledge(0, {serial++}, at(millisecond + 5));
    sent.holdBackOvertaken(at(millisecond + 5));
    // The first packet is lost each time. 30 ms is the first time after a quarter of the limit.
    EXPECT_EQ(sent.waiting(), millisecond % 30 == 0 ? 1u : 0u) << millisecond;
    if (sent.waiting() == 0) continue;
    EXPECT_EQ(sent.firstWaiting(0), 0u);
    sent.moveTo(0, 0, at(millisecond));
  }
  EXPECT_EQ(serials(), (std::vector<uint64_t>{0, 1})) << "nothing says that the second is lost";
  sent.acknowledge(2, {}, at(300));
  EXPECT_FALSE(paths.hasWork());
}

TEST_F(SentPacketsTest, NothingIsUnderWayOnceTheyAreDropped) {
  for (uint64_t serial = 0; serial < 8; ++serial) send(serial, serial % kPaths);
  sent.holdBack(3);
  sent.drop();
  EXPECT_TRUE(sent.empty());
  EXPECT_EQ(sent.waiting(), 0u);
  EXPECT_FALSE(paths.hasWork());
  send(9, 0);
  sent.holdBack(0);
  sent.clear();
  EXPECT_EQ(sent.firstWaiting(0), std::nullopt);
}

}  // namespace
}  // namespace mooncake::testing
