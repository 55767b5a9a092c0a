// Sends and receives while the other rank leaves, with ranks as threads.
#include "collectives/point_to_point.h"

#include <algorithm>
#include <functional>
#include <gtest/gtest.h>
#include <latch>
#include <thread>
#include <tuple>

#include "collectives/collectives.h"
#include "ranks_in_threads.h"

namespace mooncake::test {
namespace {

class MessagesToWhoLeaves : public testing::TestWithParam<const char*> {
 protected:
  Ranks ranks(int size) const { return {.size = size, .transports = {GetParam()}}; }
};

Bytes contents(size_t bytes, int salt) { return Bytes(bytes, std::byte(salt)); }

void expectLost(const std::shared_ptr<Message>& message, const std::string& why) {
  ASSERT_TRUE(message->finished()) << "still waits: " << why;
  EXPECT_EQ(message->status().code(), ErrorCode::kPeerLost);
  EXPECT_NE(message->status().error().message.find(why), std::string::npos)
      << message->status().error().message;
}

constexpr ErrorCode kEnd = ErrorCode::kAborted;
constexpr std::chrono::milliseconds kABit(300);

// A rank leaves a group when its messages are aborted. Its engine and its job go on.
TEST_P(MessagesToWhoLeaves, WhatWasSentBeforeArrivesAndThenReceivesEnd) {
  constexpr int kCount = 6;
  std::latch posted(1), left(1), done(1);
  runRanks(ranks(3), [&](Group& group) {
    PointToPoint messages(group);
    if (group.rank() == 1) {
      posted.wait();
      for (int i = 0; i < kCount; ++i) {
        const Bytes data = contents(100, i);
        const auto sent = messages.send(data, 0, 0, soon());
        EXPECT_TRUE(messages.wait(*sent, soon()));
      }
      messages.abort({kEnd, "left"});
      left.count_down();
    } else if (group.rank() == 0) {
      Bytes first(100), late(100), wrongTag(100);
      const auto firstOne = messages.receive(first, 1, 0, soon());
      const auto never = messages.receive(wrongTag, 1, 7, soon());
      posted.count_down();
      EXPECT_TRUE(messages.wait(*firstOne, soon()));
      EXPECT_TRUE(messages.wait(*never, soon())) << "posted before it left";
      expectLost(never, "receive from rank 1: it has left the group");
      left.wait();
      for (int i = 1; i < kCount; ++i) {
        const auto received = messages.receive(late, 1, 0, soon());
        EXPECT_TRUE(messages.wait(*received, soon()));
        EXPECT_TRUE(received->status().ok()) << received->status().error().message;
        EXPECT_EQ(late, contents(100, i));
      }
      const auto after = messages.receive(late, 1, 0, soon());
      EXPECT_TRUE(messages.wait(*after, soon())) << "posted after it left";
      expectLost(after, "receive from rank 1: it has left the group");
      for (const size_t bytes : {size_t(100), size_t(100'000)}) {
        const Bytes data = contents(bytes, 1);
        const auto sent = messages.send(data, 1, 0, soon());
        EXPECT_TRUE(messages.wait(*sent, soon()));
        expectLost(sent, "send to rank 1: it has left the group");
      }
      done.count_down();
    }
    done.wait();
    messages.abort({kEnd, "the end"});
  });
}

TEST_P(MessagesToWhoLeaves, AReceiveFromAnySourceEndsWhenNobodyIsLeft) {
  std::latch posted(1), oneLeft(1), done(1);
  runRanks(ranks(3), [&](Group& group) {
    PointToPoint messages(group);
    if (group.rank() == 1) {
      posted.wait();
      messages.abort({kEnd, "left"});
      oneLeft.count_down();
    } else if (group.rank() == 2) {
      oneLeft.wait();
      const Bytes data = contents(100'000, 2);
      const auto sent = messages.send(data, 0, 0, soon());
      EXPECT_TRUE(messages.wait(*sent, soon()));
      EXPECT_TRUE(sent->status().ok()) << "it was received before the end";
      messages.abort({kEnd, "left"});
    } else {
      Bytes first(100'000), second(10);
      const auto received = messages.receive(first, PointToPoint::kAnySource, 0, soon());
      const auto never = messages.receive(second, PointToPoint::kAnySource, 0, soon());
      posted.count_down();
      EXPECT_TRUE(messages.wait(*received, soon()));
      EXPECT_TRUE(received->status().ok()) << received->status().error().message;
      EXPECT_EQ(received->peer(), 2);
      EXPECT_TRUE(messages.wait(*never, soon()));
      expectLost(never, "receive from any rank: nobody is left");
      done.count_down();
    }
    done.wait();
    messages.abort({kEnd, "the end"});
  });
}

INSTANTIATE_TEST_SUITE_P(Wires, MessagesToWhoLeaves,
                         testing::Values("inproc", "shm", "tcp", "sim", "fabric"));

// Two ranks. Rank 0 sends, rank 1 receives. The messages are fetched: long ones, and short ones of a
// sender that waits for the receive.
class FetchedMessages : public testing::TestWithParam<std::tuple<const char*, size_t>> {
 protected:
  static const char* wire() { return std::get<0>(GetParam()); }
  static size_t length() { return std::get<1>(GetParam()); }
  static bool untilReceived() { return length() <= kCellPayload; }
  using Body = std::function<void(Group&, PointToPoint&)>;

  void run(const Body& sender, const Body& receiver) const {
    runRanks({.size = 2, .transports = {wire()}}, [&](Group& group) {
      PointToPoint messages(group, untilReceived());
      group.rank() == 0 ? sender(group, messages) : receiver(group, messages);
      EXPECT_TRUE(barrier(group, soon()).ok());
      messages.abort({kEnd, "the end"});
    });
  }
  static void expectOk(PointToPoint& messages, const std::shared_ptr<Message>& message) {
    ASSERT_TRUE(messages.wait(*message, soon()));
    EXPECT_TRUE(message->status().ok()) << message->status().error().message;
  }
  // Drives the messages until the condition holds, or the test's time is over.
  template <typename Condition>
  static void driveUntil(PointToPoint& messages, Condition condition) {
    for (const Deadline deadline = soon(); !condition();) {
      ASSERT_FALSE(deadline.passed());
      messages.progress();
      std::this_thread::yield();
    }
  }
};

// More messages than either mailbox has places for.
TEST_P(FetchedMessages, AreReceivedInAnyOrder) {
  constexpr int kCount = 100;
  run(
      [](Group&, PointToPoint& messages) {
        std::vector<Bytes> data;
        std::vector<std::shared_ptr<Message>> sent;
        for (int i = 0; i < kCount; ++i) {
          data.push_back(contents(length(), i));
          sent.push_back(messages.send(data.back(), 1, uint32_t(i), soon()));
        }
        for (const auto& message : sent) expectOk(messages, message);
      },
      [](Group&, PointToPoint& messages) {
        for (int i = kCount - 1; i >= 0; --i) {
          Bytes data(length());
          expectOk(messages, messages.receive(data, 0, uint32_t(i), soon()));
          EXPECT_EQ(data, contents(length(), i));
        }
        driveUntil(messages, [&] { return !messages.owes(); });
      });
}

// The sender reads no acknowledgement before all messages are received. Those beyond the ring wait.
TEST_P(FetchedMessages, AcknowledgementsWaitForASenderThatDoesNotLook) {
  constexpr int kCount = 3 * int(kMailboxAcks);
  std::latch received(1);
  run(
      [&](Group&, PointToPoint& messages) {
        std::vector<Bytes> data;
        std::vector<std::shared_ptr<Message>> sent;
        for (int i = 0; i < kCount; ++i) data.push_back(contents(length(), i));
        for (int i = 0; i < kCount; ++i)
          sent.push_back(messages.send(data[size_t(i)], 1, 0, soon()));
        driveUntil(messages, [&] {
          return std::ranges::all_of(sent, [](const auto& one) { return one->wasSent(); });
        });
        received.wait();
        for (const auto& message : sent) expectOk(messages, message);
      },
      [&](Group&, PointToPoint& messages) {
        std::vector<Bytes> data(kCount, Bytes(length()));
        for (int i = 0; i < kCount; ++i)
          expectOk(messages, messages.receive(data[size_t(i)], 0, 0, soon()));
        for (int i = 0; i < kCount; ++i) EXPECT_EQ(data[size_t(i)], contents(length(), i));
        received.count_down();
        driveUntil(messages, [&] { return !messages.owes(); });
        EXPECT_TRUE(messages.progress());
      });
}

// The receiver is told that a send was given up. Later sends have their full room.
TEST_P(FetchedMessages, ThatWereGivenUpLeaveRoomForOthers) {
  constexpr int kCount = 3 * int(kMailboxCells + kMailboxAcks);
  std::latch givenUp(1);
  run(
      [&](Group&, PointToPoint& messages) {
        const Bytes lost = contents(length(), 1), data = contents(length(), 2);
        for (int i = 0; i < kCount; ++i) {
          const auto sent = messages.send(lost, 1, 5, soon());
          driveUntil(messages, [&] { return sent->wasSent(); });
          messages.cancel(*sent, {ErrorCode::kAborted, "the test gives it up"});
          ASSERT_TRUE(sent->finished());
        }
        givenUp.count_down();
        expectOk(messages, messages.send(data, 1, 6, soon()));
        expectOk(messages, messages.send(data, 1, 5, soon()));
      },
      [&](Group&, PointToPoint& messages) {
        Bytes data(length());
        // This receive takes the announcements out of the mailbox as they arrive.
        const auto later = messages.receive(data, 0, 6, soon());
        driveUntil(messages, [&] { return givenUp.try_wait(); });
        expectOk(messages, later);
        EXPECT_EQ(data, contents(length(), 2));
        for (int i = 0; i < kCount; ++i) {
          const auto none = messages.receive(data, 0, 5, soon());
          ASSERT_TRUE(messages.wait(*none, soon()));
          EXPECT_EQ(none->status().code(), ErrorCode::kRefused);
          EXPECT_NE(none->status().error().message.find("receive from rank 0: it gave up"),
                    std::string::npos)
              << none->status().error().message;
        }
        expectOk(messages, messages.receive(data, 0, 5, soon()));
        EXPECT_EQ(data, contents(length(), 2));
      });
}

// A message releases its owner when it ends, in any way, and not before.
TEST_P(FetchedMessages, KeepTheirOwnersUntilTheyEnd) {
  std::latch looked(1);
  run(
      [&](Group&, PointToPoint& messages) {
        auto data = std::make_shared<Bytes>(contents(length(), 3));
        const std::weak_ptr<Bytes> seen = data;
        const Bytes& bytes = *data;
        const auto sent = messages.send(bytes, 1, 0, soon(), nullptr, std::move(data));
        messages.progress();
        EXPECT_FALSE(sent->finished());
        EXPECT_FALSE(seen.expired());
        looked.count_down();
        expectOk(messages, sent);
        EXPECT_TRUE(seen.expired()) << "after its end";
        auto other = std::make_shared<Bytes>(contents(length(), 4));
        const std::weak_ptr<Bytes> seenOther = other;
        const Bytes& otherBytes = *other;
        const auto cancelled = messages.send(otherBytes, 1, 9, soon(), nullptr, std::move(other));
        messages.progress();
        EXPECT_FALSE(seenOther.expired());
        messages.cancel(*cancelled, {ErrorCode::kAborted, "the test gives it up"});
        EXPECT_TRUE(seenOther.expired()) << "after cancel()";
      },
      [&](Group&, PointToPoint& messages) {
        looked.wait();
        auto data = std::make_shared<Bytes>(length());
        const std::weak_ptr<Bytes> seen = data;
        Bytes& bytes = *data;
        const auto received =
            messages.receive(bytes, 0, 0, Deadline::after(std::chrono::seconds(60)), nullptr, data);
        expectOk(messages, received);
        EXPECT_EQ(*data, contents(length(), 3));
        data.reset();
        EXPECT_TRUE(seen.expired()) << "after its end";
      });
}

// A rank that comes back may be fenced before it learns that the job goes on without it. Only the
// view says so: until then its receive waits, and does not end with a broken fetch.
TEST_P(FetchedMessages, FromARankThatFencedUsWaitForTheView) {
  std::latch begun(1), fenced(1), done(2);
  runRanks({.size = 2, .transports = {wire()}}, [&](Group& group) {
    PointToPoint messages(group, untilReceived());
    const Bytes data = contents(length(), 5);
    if (group.rank() == 0) {
      const auto sent = messages.send(data, 1, 0, soon());
      driveUntil(messages, [&] { return sent->wasSent(); });
      begun.wait();
      group.window().peer(1)->channel->fence();
      fenced.count_down();
      done.arrive_and_wait();
    } else {
      Bytes never(1), target(length());
      // Takes in the announcement, which a fence may drop on its way.
      const auto other = messages.receive(never, 0, 7, Deadline::after(kABit));
      EXPECT_FALSE(messages.wait(*other, Deadline::after(kABit)) && other->status().ok());
      begun.count_down();
      fenced.wait();
      const auto received = messages.receive(target, 0, 0, Deadline::after(kABit));
      EXPECT_TRUE(messages.wait(*received, soon()));
      if (received->status().ok()) {  // where the sender's memory can be read
        EXPECT_EQ(target, data);
      } else {
        EXPECT_EQ(received->status().code(), ErrorCode::kTimeout)
            << received->status().error().message;
      }
      messages.abort({kEnd, "left"});
      group.fail({kEnd, "left"});
      done.arrive_and_wait();
    }
    messages.abort({kEnd, "the end"});
  });
}

INSTANTIATE_TEST_SUITE_P(Wires, FetchedMessages,
                         testing::Combine(testing::Values("inproc", "shm", "tcp", "sim", "fabric"),
                                          testing::Values(kCellPayload + 100, size_t(100))));

}  // namespace
}  // namespace mooncake::test
