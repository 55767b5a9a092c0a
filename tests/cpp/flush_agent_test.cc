// What an agent makes of the messages of others when they come in another order than they were
// sent: the test carries them.
#include "collectives/flush_agent.h"

#include <condition_variable>
#include <future>
#include <gtest/gtest.h>
#include <list>
#include <mutex>

#include "ranks_in_threads.h"

namespace mooncake::test {
namespace {

using Wish = FlushReport::Wish;
using Kind = FlushAgent::Settled::Kind;

// The first byte of a message.
constexpr uint8_t kReport = 1, kEnded = 2, kLeft = 3, kAsk = 4;

// Groups ended their first operation when they were made.
constexpr uint64_t kFirst = 2;

// Each agent has a door of its own, so what it says goes to a door that the test holds open. Over
// messages: nobody sees the words of another.
class FlushAgentTest : public ::testing::Test {
 protected:
  struct Letter {
    int from, to;
    Bytes message;
  };

  void makeAgents(int size) {
    std::vector<int> everybody;
    for (int r = 0; r < size; ++r) everybody.push_back(r);
    groups_.resize(size);
    std::vector<std::thread> threads;
    for (int r = 0; r < size; ++r) {
      threads.emplace_back([&, r] {
        EngineOptions options{.env = envOf({.transports = {"tcp"}}),
                              .logName = "rank " + std::to_string(r),
                              .arenaBytes = size_t(1) << 30};
        options.jobKey = Bytes(32, std::byte{7});
        auto engine = Engine::create(std::move(options));
        ASSERT_TRUE(engine.ok()) << engine.error().message;
        auto group =
            Group::create(*engine, store_, {.name = "test", .rank = r, .size = size}, soon());
        ASSERT_TRUE(group.ok()) << group.error().message;
        groups_[r] = std::move(*group);
      });
    }
    for (auto& thread : threads) thread.join();
    ASSERT_FALSE(HasFailure());
    for (int r = 0; r < size; ++r) {
      for (int from = 0; from < size; ++from) {
        if (from == r) continue;
        groups_[r]->engine().openDoor(doorOf(from), [this, from, r](const EngineId&, ByteView all) {
          std::lock_guard lock(mutex_);
          letters_.push_back({from, r, Bytes(all.begin(), all.end())});
          arrived_.notify_all();
        });
      }
      agents_.push_back(std::make_shared<FlushAgent>(*groups_[r], *groups_[r]->membership(),
                                                     doorOf(r), everybody, false, false));
      agents_[r]->start();
    }
  }

  void TearDown() override {
    for (size_t r = 0; r < agents_.size(); ++r) {
      for (size_t from = 0; from < agents_.size(); ++from)
        groups_[r]->engine().closeDoor(doorOf(static_cast<int>(from)));
      agents_[r]->stop();
    }
  }

  FlushAgent& agent(int rank) { return *agents_[rank]; }
  Group& group(int rank) { return *groups_[rank]; }

  std::future<FlushAgent::Settled> settle(int rank, uint64_t number, Wish wish, Error why = {}) {
    return std::async(std::launch::async,
                      [=, this] { return agent(rank).settle(number, wish, why); });
  }

  // The oldest of this kind that nobody took yet. Whoever has it may keep it.
  Letter take(int from, int to, uint8_t kind) {
    std::unique_lock lock(mutex_);
    auto found = letters_.end();
    const bool came = arrived_.wait_until(lock, soon().when(), [&] {
      found = std::ranges::find_if(letters_, [&](const Letter& one) {
        return one.from == from && one.to == to && one.message[0] == std::byte{kind};
      });
      return found != letters_.end();
    });
    if (!came) {
      ADD_FAILURE() << "rank " << from << " did not tell rank " << to;
      return {from, to, {}};
    }
    Letter letter = std::move(*found);
    letters_.erase(found);
    return letter;
  }

  // Returns when the agent has made of it what it makes of it.
  void deliver(const Letter& letter) {
    const auto send = [&](ByteView message) {
      const auto sent = group(letter.from)
                            .engine()
                            .send(group(letter.to).engine().id(), doorOf(letter.to), message);
      ASSERT_TRUE(sent.ok()) << sent.error().message;
    };
    send(letter.message);
    send(ByteWriter().put(kAsk).take());  // behind it
    take(letter.to, letter.from, kEnded);
  }

 private:
  static uint64_t doorOf(int rank) { return 1000 + rank; }

  MemoryStore store_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<std::shared_ptr<FlushAgent>> agents_;
  std::mutex mutex_;  // guards letters_
  std::condition_variable arrived_;
  std::list<Letter> letters_;
};

// Who decides first knows that the others will come to the same, and need not wait for them.
TEST_F(FlushAgentTest, AFarewellBeforeTheReportSaysHowTheOperationEnded) {
  makeAgents(2);
  ASSERT_TRUE(agent(0).begin(kFirst).ok());
  ASSERT_TRUE(agent(1).begin(kFirst).ok());
  auto waits = settle(0, kFirst, Wish::kNone);
  auto gaveUp = settle(1, kFirst, Wish::kTimeout, {ErrorCode::kTimeout, "too late"});
  deliver(take(0, 1, kReport));
  EXPECT_EQ(gaveUp.get().status.code(), ErrorCode::kTimeout);
  agent(1).leave(kFirst, soon());

  const Letter report = take(1, 0, kReport);
  deliver(take(1, 0, kLeft));
  const auto settled = waits.get();
  ASSERT_EQ(settled.kind, Kind::kEnded) << "taken for done";
  EXPECT_EQ(settled.status.code(), ErrorCode::kTimeout);
  EXPECT_EQ(settled.status.error().message, "too late");

  deliver(report);  // of a flush that is over
  EXPECT_FALSE(agent(0).isFrozen());
  EXPECT_EQ(agent(0).ended(), kFirst);
}

// It says what its report says, also of an operation that it has never called.
TEST_F(FlushAgentTest, AFarewellTellsOfOperationsThatItsRankDidNotCall) {
  makeAgents(3);
  ASSERT_TRUE(agent(0).begin(kFirst).ok());
  ASSERT_TRUE(agent(1).begin(kFirst).ok());
  auto gaveUp = settle(0, kFirst, Wish::kTimeout, {ErrorCode::kTimeout, "too late"});
  auto waits = settle(1, kFirst, Wish::kNone);
  deliver(take(0, 2, kReport));
  deliver(take(1, 2, kReport));
  EXPECT_EQ(agent(2).ended(), kFirst);

  // Rank 0 dies: what it wished for is known to rank 2 alone.
  take(2, 1, kReport);
  const View without0{2, RankSet::firstRanks(3) - RankSet{0}};
  agent(1).onView(without0);
  agent(2).onView(without0);
  deliver(take(1, 2, kReport));
  agent(2).leave(kFirst - 1, soon());
  group(0).fail({ErrorCode::kAborted, "dead"});
  gaveUp.get();
  deliver(take(2, 1, kLeft));
  const auto settled = waits.get();
  ASSERT_EQ(settled.kind, Kind::kEnded);
  EXPECT_EQ(settled.status.code(), ErrorCode::kTimeout);
}

// Who goes on differently from one decision may end the next operation with other contributors.
TEST_F(FlushAgentTest, WhoIsInDoesNotDependOnWhatCameFirst) {
  makeAgents(3);
  for (int r = 0; r < 3; ++r) ASSERT_TRUE(agent(r).begin(kFirst).ok());
  auto first = settle(0, kFirst, Wish::kNone);
  auto second = settle(1, kFirst, Wish::kNone);
  auto leaver = settle(2, kFirst, Wish::kTimeout, {ErrorCode::kTimeout, "too late"});
  deliver(take(0, 2, kReport));
  deliver(take(1, 2, kReport));
  EXPECT_EQ(leaver.get().status.code(), ErrorCode::kTimeout);
  agent(2).leave(kFirst, soon());

  deliver(take(1, 0, kReport));
  deliver(take(2, 0, kReport));
  EXPECT_EQ(first.get().status.code(), ErrorCode::kTimeout);
  deliver(take(2, 1, kLeft));
  deliver(take(0, 1, kReport));
  EXPECT_EQ(second.get().status.code(), ErrorCode::kTimeout);
  EXPECT_EQ(agent(0).attempt(), agent(1).attempt());
  EXPECT_EQ(agent(0).view()->active, agent(1).view()->active);

  deliver(take(2, 0, kLeft));
  for (int r = 0; r < 2; ++r) {
    EXPECT_FALSE(agent(r).missesLeaver(kFirst));
    EXPECT_TRUE(agent(r).missesLeaver(kFirst + 1));
    ASSERT_TRUE(agent(r).begin(kFirst + 1).ok());
  }
  first = settle(0, kFirst + 1, Wish::kNone);
  second = settle(1, kFirst + 1, Wish::kNone);
  deliver(take(0, 1, kReport));
  deliver(take(1, 0, kReport));
  EXPECT_EQ(first.get().kind, Kind::kAgain);
  EXPECT_EQ(second.get().kind, Kind::kAgain);
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(agent(r).view()->active, (std::vector{0, 1}));
    EXPECT_FALSE(agent(r).missesLeaver(kFirst + 1));
  }
}

}  // namespace
}  // namespace mooncake::test
