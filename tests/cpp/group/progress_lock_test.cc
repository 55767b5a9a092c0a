// A thread waits for a message while another thread has the turn at the messages.
#include "collectives/progress_lock.h"

#include <atomic>
#include <gtest/gtest.h>
#include <mutex>
#include <thread>
#include <vector>

#include "collectives/point_to_point.h"
#include "ranks_in_threads.h"

namespace mooncake::test {
namespace {

using namespace std::chrono_literals;

// Number of receives that one turn looks at, so large that a message arrives meanwhile.
constexpr uint32_t kOthers = 8000;

TEST(Turns, WhoIsTurnedAwayIsRungForWhenTheTurnEnds) {
  Doorbell bell;
  Interrupt interrupt;
  ProgressLock turn(bell);
  turn.lock();
  std::atomic<int> looks{0};
  std::thread waiter([&] {
    const Waiter waits{bell, interrupt, interrupt.generation(), Deadline::after(5s), {.pauses = 0}};
    const auto begun = Clock::now();
    (void)waits.until([&] {
      const std::unique_lock lock(turn, std::try_to_lock);
      ++looks;
      return lock.owns_lock();
    });
    EXPECT_LT(Clock::now() - begun, 3s) << "nobody rang";
  });
  while (looks == 0 || bell.sleepers == 0) std::this_thread::yield();
  std::this_thread::sleep_for(20ms);  // asleep
  turn.unlock();
  waiter.join();
}

// A thread that only posts has the turn, and has passed the receive of a waiting thread when its
// message arrives. The waiting thread is woken when the turn ends.
TEST(Turns, WhoWaitsIsToldWhenWhoPostsIsDone) {
  std::atomic<int> posting{0}, received{0};
  runRanks({.size = 2, .transports = {"tcp"}}, [&](Group& group) {
    PointToPoint messages(group);
    Bytes one(1);
    constexpr int kRounds = 40;
    if (group.rank() == 1) {
      for (int round = 1; round <= kRounds; ++round) {
        while (posting.load() < round) std::this_thread::yield();
        const auto sent = messages.send(one, 0, 0, soon());
        EXPECT_TRUE(messages.wait(*sent, soon()));
        while (received.load() < round) std::this_thread::sleep_for(100us);
      }
    } else {
      std::vector<std::shared_ptr<Message>> others;
      for (uint32_t tag = 1; tag <= kOthers; ++tag)
        others.push_back(messages.receive({}, 1, tag, soon()));
      for (int round = 1; round <= kRounds; ++round) {
        std::thread waiter([&] {
          const auto awaited = messages.receive(one, 1, 0, soon());
          const auto begun = Clock::now();
          EXPECT_TRUE(messages.wait(*awaited, Deadline::after(3s)));
          EXPECT_LT(Clock::now() - begun, 2s) << "nobody told it";
          received = round;
        });
        std::this_thread::sleep_for(10ms);
        posting = round;
        // The message takes some time as well, so that some turns begin at the right moment.
        const auto begin = Clock::now() + (round % 10) * 40us;
        while (Clock::now() < begin) continue;
        others.push_back(messages.receive({}, 1, kOthers + uint32_t(round), soon()));
        waiter.join();
      }
    }
    messages.abort({ErrorCode::kAborted, "the end"});
  });
}

}  // namespace
}  // namespace mooncake::test
