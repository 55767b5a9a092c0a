// Agents get messages in another order than they were sent: the test delivers them.
#include "group/flush_agent.h"

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <future>
#include <gtest/gtest.h>
#include <list>
#include <mutex>

#include "base/failpoint.h"
#include "engine_side.h"
#include "ranks_in_threads.h"

namespace mooncake::test {
namespace {

using mooncake::testing::eventually;
using AbortReason = FlushReport::AbortReason;
using Kind = FlushAgent::Resolution::Kind;

// The first byte of a message.
constexpr uint8_t kReport = 1, kEnded = 2, kLeft = 3, kAsk = 4, kRepeat = 5;

// Groups ended their first operation when they were made.
constexpr uint64_t kFirst = 2;

// Each agent has a topic of its own, so its messages go to a topic that the test holds open. The
// wire is tcp: no rank maps the words of another.
class FlushAgentTest : public ::testing::Test {
 protected:
  struct Letter {
    int from, to;
    Bytes message;
  };

  void makeGroups(int size) {
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
  }

  void startAgent(int rank, uint64_t topic) {
    std::vector<int> everybody;
    for (int r = 0; r < group(rank).size(); ++r) everybody.push_back(r);
    agents_.push_back(std::make_shared<FlushAgent>(
        group(rank), *group(rank).membership(),
        FlushAgent::Options{.group = "test",
                            .rank = rank,
                            .jobRanks = everybody,
                            .roster = group(rank).membership()->roster(),
                            .topic = topic}));
    agents_.back()->start();
  }

  void makeAgents(int size) {
    makeGroups(size);
    for (int r = 0; r < size; ++r) {
      for (int from = 0; from < size; ++from) {
        if (from == r) continue;
        groups_[r]->engine().openTopic(
            doorOf(from), [this, from, r](const EngineId&, ByteView all) {
              std::lock_guard lock(mutex_);
              letters_.push_back({from, r, Bytes(all.begin(), all.end())});
              arrived_.notify_all();
            });
      }
      startAgent(r, doorOf(r));
    }
  }

  void TearDown() override {
    for (size_t r = 0; r < agents_.size(); ++r) {
      for (size_t from = 0; from < agents_.size(); ++from)
        groups_[r]->engine().closeTopic(doorOf(static_cast<int>(from)));
      agents_[r]->stop();
    }
  }

  FlushAgent& agent(int rank) { return *agents_[rank]; }
  Group& group(int rank) { return *groups_[rank]; }

  std::future<FlushAgent::Resolution> resolve(int rank, uint64_t number, AbortReason abort,
                                              Error why = {},
                                              FlushAgent::Wish wish = FlushAgent::Wish::kNone) {
    return std::async(std::launch::async, [=, this] {
      return agent(rank).resolve(number, Clock::now(), abort, why, wish);
    });
  }

  // Takes the oldest message of this kind. It is lost unless the test delivers it.
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

  // Sends until the engine takes no further message, because too many wait. The loop's thread must
  // be blocked meanwhile.
  void fillOutbox(int from, int to) {
    Status sent;
    for (size_t bytes = MessageRouter::kMostBytes; bytes > 0; bytes /= 2) {
      do sent = group(from).engine().send(group(to).engine().id(), 7, Bytes(bytes));
      while (sent.ok());
    }
    EXPECT_EQ(sent.code(), ErrorCode::kExhausted);
  }

  // Delivers the message, and returns when the agent has handled it.
  void deliver(const Letter& letter) {
    const auto send = [&](ByteView message) {
      const auto sent = group(letter.from)
                            .engine()
                            .send(group(letter.to).engine().id(), doorOf(letter.to), message);
      ASSERT_TRUE(sent.ok()) << sent.error().message;
    };
    send(letter.message);
    send(ByteWriter().put(kAsk).take());  // arrives after it
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

// The rank that decides first knows that the others will decide the same, and need not wait.
TEST_F(FlushAgentTest, AFarewellBeforeTheReportSaysHowTheOperationEnded) {
  makeAgents(2);
  ASSERT_TRUE(agent(0).begin(kFirst).ok());
  ASSERT_TRUE(agent(1).begin(kFirst).ok());
  auto waits = resolve(0, kFirst, AbortReason::kNone);
  auto gaveUp = resolve(1, kFirst, AbortReason::kTimeout, {ErrorCode::kTimeout, "too late"});
  deliver(take(0, 1, kReport));
  EXPECT_EQ(gaveUp.get().status.code(), ErrorCode::kTimeout);
  agent(1).leave(kFirst, soon());

  const Letter report = take(1, 0, kReport);
  deliver(take(1, 0, kLeft));
  const auto resolution = waits.get();
  ASSERT_EQ(resolution.kind, Kind::kEnded) << "taken for done";
  EXPECT_EQ(resolution.status.code(), ErrorCode::kTimeout);
  EXPECT_EQ(resolution.status.error().message, "too late");

  deliver(report);  // of a flush that is over
  EXPECT_FALSE(agent(0).isFrozen());
  EXPECT_EQ(agent(0).ended(), kFirst);
}

// A leave report says the same as the report, also about an operation that its rank never called.
TEST_F(FlushAgentTest, AFarewellTellsOfOperationsThatItsRankDidNotCall) {
  makeAgents(3);
  ASSERT_TRUE(agent(0).begin(kFirst).ok());
  ASSERT_TRUE(agent(1).begin(kFirst).ok());
  auto gaveUp = resolve(0, kFirst, AbortReason::kTimeout, {ErrorCode::kTimeout, "too late"});
  auto waits = resolve(1, kFirst, AbortReason::kNone);
  deliver(take(0, 2, kReport));
  deliver(take(1, 2, kReport));
  EXPECT_EQ(agent(2).ended(), kFirst);

  // Rank 0 dies: only rank 2 knows its abort reason.
  take(2, 1, kReport);
  const View without0{2, JobRanks::firstRanks(3) - JobRanks{0}};
  agent(1).onView(without0);
  agent(2).onView(without0);
  deliver(take(1, 2, kReport));
  agent(2).leave(kFirst - 1, soon());
  group(0).fail({ErrorCode::kAborted, "dead"});
  gaveUp.get();
  deliver(take(2, 1, kLeft));
  const auto resolution = waits.get();
  ASSERT_EQ(resolution.kind, Kind::kEnded);
  EXPECT_EQ(resolution.status.code(), ErrorCode::kTimeout);
}

// Ranks that go on differently from one decision may end the next operation with different
// contributors.
TEST_F(FlushAgentTest, WhoIsInDoesNotDependOnWhatCameFirst) {
  makeAgents(3);
  for (int r = 0; r < 3; ++r) ASSERT_TRUE(agent(r).begin(kFirst).ok());
  auto first = resolve(0, kFirst, AbortReason::kNone);
  auto second = resolve(1, kFirst, AbortReason::kNone);
  auto leaver = resolve(2, kFirst, AbortReason::kTimeout, {ErrorCode::kTimeout, "too late"});
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
  first = resolve(0, kFirst + 1, AbortReason::kNone);
  second = resolve(1, kFirst + 1, AbortReason::kNone);
  deliver(take(0, 1, kReport));
  deliver(take(1, 0, kReport));
  EXPECT_EQ(first.get().kind, Kind::kAgain);
  EXPECT_EQ(second.get().kind, Kind::kAgain);
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(agent(r).view()->active, (std::vector{0, 1}));
    EXPECT_FALSE(agent(r).missesLeaver(kFirst + 1));
  }
}

// A lost report is known to its own rank only. That rank decides without waiting for the ranks that
// lack the report.
TEST_F(FlushAgentTest, AReportThatIsLostComesAgain) {
  makeAgents(2);
  for (int r = 0; r < 2; ++r) ASSERT_TRUE(agent(r).begin(kFirst).ok());
  auto gaveUp = resolve(0, kFirst, AbortReason::kTimeout, {ErrorCode::kTimeout, "too late"});
  take(0, 1, kReport);  // which is lost
  deliver(take(0, 1, kRepeat));
  auto waits = resolve(1, kFirst, AbortReason::kNone);
  EXPECT_EQ(waits.get().status.error().message, "too late");
  take(1, 0, kReport);  // which is lost, and its rank has no reason to repeat it
  EXPECT_TRUE(agent(0).isFrozen());
  deliver(take(0, 1, kRepeat));
  deliver(take(1, 0, kReport));
  EXPECT_EQ(gaveUp.get().status.error().message, "too late");
}

// A skipped rank learns it when it calls. It returns when all others have ended the operation. The
// end on one of them is not enough: if that rank dies, the operation runs again.
TEST_F(FlushAgentTest, WhoIsSkippedEndsWhenAllOthersHave) {
  makeAgents(3);
  for (int r = 0; r < 2; ++r) {
    ASSERT_TRUE(agent(r).begin(kFirst).ok());
    agent(r).begins(kFirst);
  }
  auto first = resolve(0, kFirst, AbortReason::kNone, {}, FlushAgent::Wish::kSkip);
  auto second = resolve(1, kFirst, AbortReason::kNone);
  for (int from = 0; from < 3; ++from) {
    for (int to = 0; to < 3; ++to) {
      if (from != to) deliver(take(from, to, kReport));
    }
  }
  for (auto* one : {&first, &second}) EXPECT_EQ(one->get().kind, Kind::kAgain);
  EXPECT_EQ(agent(0).view()->active, (std::vector{0, 1}));
  EXPECT_EQ(agent(0).view()->skipped, std::vector{2});
  EXPECT_EQ(agent(2).viewWhenIdle()->active, (std::vector{0, 1, 2})) << "it is not lost";

  const auto hasEnded = [](int rank) {
    return Letter{rank, 2,
                  ByteWriter().put(kEnded).put(kFirst).put(uint64_t(0)).put(uint8_t(0)).take()};
  };
  agent(0).end(kFirst, {});
  auto late = std::async(std::launch::async, [&] { return agent(2).begin(kFirst); });
  take(2, 0, kAsk);
  take(2, 1, kAsk);
  deliver(hasEnded(0));
  take(2, 1, kAsk);  // again: one of two has ended it
  EXPECT_EQ(late.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  agent(1).end(kFirst, {});
  deliver(hasEnded(1));
  EXPECT_EQ(late.get().code(), ErrorCode::kInterrupted);
  const auto view = agent(2).takeSkipped();
  ASSERT_TRUE(view);
  EXPECT_EQ(view->active, (std::vector{0, 1}));
  EXPECT_EQ(view->skipped, std::vector{2});
  for (int r = 0; r < 3; ++r) {
    ASSERT_TRUE(agent(r).begin(kFirst + 1).ok());
    EXPECT_EQ(agent(r).view()->active, (std::vector{0, 1, 2}));
  }
}

// The agent hears of the flush while its caller is in an operation. The caller ends it before the
// agent sees it idle. Without that end in the report, the others would run the operation again.
TEST_F(FlushAgentTest, AReportSaysWhatTheCallerEndedWhileTheFlushBegan) {
  static std::atomic<FlushAgent*> toEnd;
  makeAgents(2);
  for (int r = 0; r < 2; ++r) {
    ASSERT_TRUE(agent(r).begin(kFirst).ok());
    agent(r).begins(kFirst);
  }
  auto waits = resolve(1, kFirst, AbortReason::kNone);
  const Letter report = take(1, 0, kReport);
  toEnd = &agent(0);
  observeFailpoints([](const char* name) {
    if (std::strcmp(name, "join") != 0) return;
    if (FlushAgent* const agent = toEnd.exchange(nullptr)) agent->end(kFirst, {});
  });
  deliver(report);
  observeFailpoints([](const char*) {});
  EXPECT_EQ(agent(0).ended(), kFirst);
  deliver(take(0, 1, kReport));
  EXPECT_EQ(waits.get().kind, Kind::kTake);
  EXPECT_EQ(agent(0).ended(), kFirst);
}

TEST_F(FlushAgentTest, WhoLacksALeaversReportIsToldThatItLeft) {
  makeAgents(2);
  for (int r = 0; r < 2; ++r) ASSERT_TRUE(agent(r).begin(kFirst).ok());
  auto waits = resolve(0, kFirst, AbortReason::kNone);
  auto gaveUp = resolve(1, kFirst, AbortReason::kTimeout, {ErrorCode::kTimeout, "too late"});
  deliver(take(0, 1, kReport));
  EXPECT_EQ(gaveUp.get().status.code(), ErrorCode::kTimeout);
  agent(1).leave(kFirst, soon());
  take(1, 0, kReport);
  take(1, 0, kLeft);  // both are lost
  deliver(take(0, 1, kRepeat));
  deliver(take(1, 0, kLeft));
  EXPECT_EQ(waits.get().status.error().message, "too late");
}

// [mut-move-begun] The caller has parked before it published that it began: its call moves.
TEST_F(FlushAgentTest, ACallThatHasPublishedNothingMovesWithTheClose) {
  makeAgents(2);
  for (int r = 0; r < 2; ++r) ASSERT_TRUE(agent(r).renewal().readyFor(7).ok());
  take(0, 1, kEnded);  // is lost
  deliver(take(1, 0, kEnded));
  ASSERT_TRUE(agent(1).begin(kFirst).ok());
  agent(0).renewal().wishFor(7);
  deliver(take(0, 1, kReport));
  auto moves = resolve(1, kFirst, AbortReason::kNone);
  deliver(take(1, 0, kReport));
  EXPECT_EQ(moves.get().kind, Kind::kMoved);
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(agent(r).renewal().close(), (SeriesClose{7, kFirst - 1}));
    EXPECT_EQ(agent(r).begin(kFirst).code(), ErrorCode::kMoved);
  }
}

// Messages for a topic that is not open yet are kept, up to a limit.
TEST_F(FlushAgentTest, AFloodOfEarlyMessagesCostsNoFlushItsEnd) {
  constexpr uint64_t kTopic = 1000, kBehind = 999;
  makeGroups(2);
  startAgent(0, kTopic);
  ASSERT_TRUE(agent(0).begin(kFirst).ok());
  auto gaveUp = resolve(0, kFirst, AbortReason::kTimeout, {ErrorCode::kTimeout, "too late"});
  ASSERT_TRUE(eventually([&] { return agent(0).isFrozen(); }));
  const Bytes large(MessageRouter::kMostBytes);
  for (uint64_t bytes = 0, topic = 2000; bytes <= MessageRouter::kMostEarlyBytes; ++topic) {
    const Status sent = group(0).engine().send(group(1).engine().id(), topic, large);
    if (sent.ok()) bytes += large.size();
  }
  std::promise<void> arrived;
  group(1).engine().openTopic(kBehind, [&](const EngineId&, ByteView) { arrived.set_value(); });
  ASSERT_TRUE(
      group(0).engine().send(group(1).engine().id(), kBehind, ByteWriter().put(kAsk).take()).ok());
  ASSERT_EQ(arrived.get_future().wait_until(soon().when()), std::future_status::ready);
  group(1).engine().closeTopic(kBehind);
  startAgent(1, kTopic);
  EXPECT_EQ(gaveUp.get().status.error().message, "too late");
  EXPECT_EQ(agent(1).ended(), kFirst);
}

TEST_F(FlushAgentTest, AReportThatTheEngineDoesNotTakeIsSentLater) {
  constexpr uint64_t kTopic = 1000;
  makeGroups(2);
  for (int r = 0; r < 2; ++r) startAgent(r, kTopic);
  ASSERT_TRUE(agent(0).begin(kFirst).ok());
  std::promise<void> goOn;
  group(0).engine().loop().post([&] { goOn.get_future().wait(); });
  fillOutbox(0, 1);
  auto gaveUp = resolve(0, kFirst, AbortReason::kTimeout, {ErrorCode::kTimeout, "too late"});
  ASSERT_TRUE(eventually([&] { return agent(0).isFrozen(); }));
  goOn.set_value();
  EXPECT_EQ(gaveUp.get().status.error().message, "too late");
  EXPECT_EQ(agent(1).ended(), kFirst);
}

// A stamp has no room for another round: all ranks get the error, not only the one that wanted it.
TEST_F(FlushAgentTest, TheLastRoundEndsTheGroupOnAllRanks) {
  makeAgents(2);
  const FlushReport last{.from = 1, .attempt = {0, kMostRounds}, .ended = kFirst - 1};
  deliver({1, 0, ByteWriter().put(kReport).putRaw(encodeFlushReport(last)).take()});
  deliver(take(0, 1, kReport));
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(agent(r).attempt(), last.attempt);
    ASSERT_TRUE(agent(r).begin(kFirst).ok());
  }
  auto gaveUp = resolve(0, kFirst, AbortReason::kTimeout, {ErrorCode::kTimeout, "too late"});
  const Status status = gaveUp.get().status;
  EXPECT_EQ(status.code(), ErrorCode::kExhausted);
  EXPECT_NE(status.error().message.find("make it again"), std::string::npos);
  deliver(take(0, 1, kReport));
  EXPECT_EQ(group(1).usable().code(), ErrorCode::kExhausted);
}

FlushAgent* watched = nullptr;
std::atomic<int> sentMessages{0}, sentUnderTheLock{0};

// Takes the lock on another thread, because no thread may take a lock twice.
void takeTheLockBeside(const char* name) {
  if (!watched || std::strcmp(name, "tell") != 0) return;
  ++sentMessages;
  const auto taken = std::make_shared<std::promise<void>>();
  std::thread([taken] {
    (void)watched->viewWhenIdle();
    taken->set_value();
  }).detach();
  const auto how = taken->get_future().wait_for(std::chrono::seconds(10));
  if (how != std::future_status::ready) ++sentUnderTheLock;
}

TEST_F(FlushAgentTest, NothingIsSentUnderTheLock) {
  observeFailpoints(takeTheLockBeside);
  makeAgents(2);
  watched = &agent(0);
  for (int r = 0; r < 2; ++r) ASSERT_TRUE(agent(r).begin(kFirst).ok());
  auto gaveUp = resolve(0, kFirst, AbortReason::kTimeout, {ErrorCode::kTimeout, "too late"});
  deliver(take(0, 1, kReport));
  auto waits = resolve(1, kFirst, AbortReason::kNone);
  deliver(take(1, 0, kReport));
  gaveUp.get();
  waits.get();
  watched = nullptr;
  areFailpointsOn = false;
  EXPECT_GT(sentMessages, 0);
  EXPECT_EQ(sentUnderTheLock, 0);
}

}  // namespace
}  // namespace mooncake::test
