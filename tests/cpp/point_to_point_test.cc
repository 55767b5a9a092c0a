// Sends and receives whose other side goes, with ranks as threads.
#include "collectives/point_to_point.h"

#include <gtest/gtest.h>
#include <latch>

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

}  // namespace
}  // namespace mooncake::test
