// Groups are destroyed while threads wait for their messages. AddressSanitizer finds more.
#include <gtest/gtest.h>
#include <latch>
#include <memory>
#include <thread>

#include "base/failpoint.h"
#include "collectives/point_to_point.h"
#include "ranks_in_threads.h"

namespace mooncake::test {
namespace {

constexpr int kWaiters = 3;

// Destroys a group as its owner does, while other threads hold only messages and the PointToPoint.
void destroyUnderWaiters(std::unique_ptr<Group> group, std::latch& allWait) {
  const auto messages = std::make_shared<PointToPoint>(*group);
  const int other = 1 - group->rank();
  std::vector<std::thread> waiters;
  for (int i = 0; i < kWaiters; ++i) {
    waiters.emplace_back([messages, other, i] {
      std::byte data[8];
      const auto message = messages->receive(data, other, uint32_t(i), soon());
      EXPECT_TRUE(messages->wait(*message, soon()));
      EXPECT_FALSE(message->status().ok());
    });
  }
  for (const Deadline deadline = soon(); messages->drivers() < kWaiters && !deadline.passed();)
    std::this_thread::yield();
  allWait.arrive_and_wait();
  const Error why{ErrorCode::kAborted, "the group was destroyed"};
  group->fail(why);
  messages->abort(why);
  EXPECT_TRUE(messages->close(soon()));
  EXPECT_EQ(messages->drivers(), 0u);
  group.reset();  // also the last reference to the engine, its arena and the doorbell
  EXPECT_TRUE(messages->progress());
  for (auto& waiter : waiters) waiter.join();
}

TEST(MessageClose, WaitsForThoseWhoWait) {
  // Delays the waiting threads at each look, so that they would find the group destroyed.
  for (uint32_t nth = 1; nth <= 2 * kWaiters; ++nth)
    armFailpoint("message-looked", nth, FailpointAction::kDelay, 50);
  MemoryStore store;
  std::latch allWait(2);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      EngineOptions options{.env = envOf({.transports = {"inproc"}}),
                            .logName = "rank " + std::to_string(rank),
                            .arenaBytes = size_t(1) << 30};
      options.jobKey = Bytes(32, std::byte{7});
      auto engine = Engine::create(std::move(options));
      ASSERT_TRUE(engine.ok()) << engine.error().message;
      auto group = Group::create(
          std::move(*engine), store,
          {.name = "test", .rank = rank, .size = 2, .mailboxBytes = kMailboxBytes}, soon());
      ASSERT_TRUE(group.ok()) << group.error().message;
      destroyUnderWaiters(std::move(*group), allWait);
    });
  }
  for (auto& rank : ranks) rank.join();
}

}  // namespace
}  // namespace mooncake::test
