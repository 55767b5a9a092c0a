#include "base/wait.h"

#include <gtest/gtest.h>
#include <memory>
#include <new>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace mooncake {
namespace {

using namespace std::chrono_literals;

constexpr SpinPolicy kSleepAtOnce{.pauses = 0, .yields = 0};
constexpr SpinPolicy kSpinALittle{.pauses = 20, .yields = 5};

// Waits until a thread or process sleeps at the bell: the sleeper has announced itself.
bool waitForSleeper(const Doorbell& bell) {
  const Deadline deadline = Deadline::after(20s);
  while (bell.sleepers.load() == 0 && !deadline.passed()) std::this_thread::yield();
  return bell.sleepers.load() != 0;
}

TEST(Deadline, KnowsWhenItPassed) {
  EXPECT_TRUE(Deadline::after(0s).passed());
  EXPECT_TRUE(Deadline::after(-1s).passed());
  EXPECT_EQ(Deadline::after(-1s).left(), 0ns);
  const Deadline later = Deadline::after(1h);
  EXPECT_FALSE(later.passed());
  EXPECT_GT(later.left(), 59min);
  EXPECT_LE(later.left(), 1h);
  EXPECT_EQ(later.earlier(Deadline::after(2h)).when(), later.when());
}

TEST(Deadline, TheLongestBudgetsDoNotOverflow) {
  EXPECT_FALSE(Deadline::after(std::chrono::nanoseconds::max()).passed());
  EXPECT_GT(Deadline::at(Clock::time_point::max()).left(), 24h * 365);
  EXPECT_EQ(Deadline::at(Clock::time_point::min()).left(), 0ns);
}

TEST(Wait, ReadyWinsOverInterruptAndDeadline) {
  Doorbell bell;
  Interrupt interrupt;
  interrupt.bump();
  for (const SpinPolicy spin : {kSleepAtOnce, kSpinALittle}) {
    const Waiter waiter{bell, interrupt, 0, Deadline::after(0s), spin};
    EXPECT_EQ(waiter.until([] { return true; }), WaitResult::kReady);
    EXPECT_EQ(waiter.until([] { return false; }), WaitResult::kInterrupted);
  }
  EXPECT_EQ(bell.sleepers, 0u);
}

TEST(Wait, AnInterruptEndsALongLook) {
  Doorbell bell;
  Interrupt interrupt;
  const Waiter waiter{bell, interrupt, interrupt.generation(), Deadline::after(60s),
                      SpinPolicy{.pauses = UINT32_MAX, .yields = 0}};  // minutes
  std::atomic<bool> looks{false};
  std::thread interrupter([&] {
    while (!looks.load()) std::this_thread::yield();
    interrupt.bump();
  });
  const auto begin = Clock::now();
  EXPECT_EQ(waiter.until([&] {
    looks = true;
    return false;
  }),
            WaitResult::kInterrupted);
  EXPECT_LT(Clock::now() - begin, 30s);
  interrupter.join();
}

TEST(Wait, EndsAtTheDeadline) {
  Doorbell bell;
  Interrupt interrupt;
  for (const auto budget : {0ms, 1ms, 30ms}) {
    const auto begin = Clock::now();
    const Waiter waiter{bell, interrupt, 0, Deadline::after(budget), kSpinALittle};
    EXPECT_EQ(waiter.until([] { return false; }), WaitResult::kTimeout);
    EXPECT_GE(Clock::now() - begin, budget);
    EXPECT_LT(Clock::now() - begin, budget + 10s);
  }
  EXPECT_EQ(bell.sleepers, 0u);
}

TEST(Wait, AnInterruptWakesSleepers) {
  Doorbell bell;
  Interrupt interrupt;
  std::atomic<int> interrupted{0};
  std::vector<std::thread> threads;
  const uint32_t generation = interrupt.generation();
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      const Waiter waiter{bell, interrupt, generation, Deadline::after(60s), kSleepAtOnce};
      if (waiter.until([] { return false; }) == WaitResult::kInterrupted) ++interrupted;
    });
  }
  EXPECT_TRUE(waitForSleeper(bell));
  interrupt.bump();
  bell.ring();
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(interrupted, 4);
}

// A token goes round: its holder passes it on and rings. Each pass is a race between the ringer and
// a player that is just falling asleep. After one lost wake-up, all stand still until the deadline.
void passTheToken(std::atomic<uint32_t>& token, Doorbell& bell, uint32_t players, uint32_t me,
                  uint32_t rounds, SpinPolicy spin, std::atomic<uint32_t>& failures) {
  Interrupt interrupt;
  const Deadline deadline = Deadline::after(100s);
  for (uint32_t round = 0; round < rounds; ++round) {
    const uint32_t mine = round * players + me;
    const Waiter waiter{bell, interrupt, 0, deadline, spin};
    const auto result = waiter.until([&] { return token.load(std::memory_order_acquire) == mine; });
    if (result != WaitResult::kReady) {
      failures.fetch_add(1);
      return;
    }
    token.fetch_add(1, std::memory_order_seq_cst);
    bell.ring();
  }
}

void playWithThreads(uint32_t players, uint32_t rounds, SpinPolicy spin) {
  std::atomic<uint32_t> token{0};
  std::atomic<uint32_t> failures{0};
  Doorbell bell;
  std::vector<std::thread> threads;
  for (uint32_t me = 0; me < players; ++me) {
    threads.emplace_back(
        [&, me] { passTheToken(token, bell, players, me, rounds, spin, failures); });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(failures, 0u);
  EXPECT_EQ(token, players * rounds);
  EXPECT_EQ(bell.sleepers, 0u);
}

TEST(Wait, NoWakeUpIsLostBetweenTwoThreads) { playWithThreads(2, 100'000, kSleepAtOnce); }
TEST(Wait, NoWakeUpIsLostAfterALittleSpinning) { playWithThreads(2, 100'000, kSpinALittle); }
TEST(Wait, NoWakeUpIsLostAmongManyThreads) { playWithThreads(8, 5'000, kSleepAtOnce); }

struct SharedTable {
  Doorbell bell;
  std::atomic<uint32_t> token{0};
  std::atomic<uint32_t> failures{0};
};

struct Unmap {
  void operator()(SharedTable* table) const { ::munmap(table, sizeof(SharedTable)); }
};

std::unique_ptr<SharedTable, Unmap> makeSharedTable() {
  void* memory = ::mmap(nullptr, sizeof(SharedTable), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return std::unique_ptr<SharedTable, Unmap>(new (memory) SharedTable);
}

TEST(Wait, NoWakeUpIsLostBetweenProcesses) {
  constexpr uint32_t kPlayers = 3, kRounds = 20'000;
  const auto table = makeSharedTable();
  std::vector<pid_t> children;
  for (uint32_t me = 1; me < kPlayers; ++me) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      passTheToken(table->token, table->bell, kPlayers, me, kRounds, kSleepAtOnce, table->failures);
      ::_exit(0);
    }
    children.push_back(child);
  }
  passTheToken(table->token, table->bell, kPlayers, 0, kRounds, kSleepAtOnce, table->failures);
  for (const pid_t child : children) {
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(table->failures, 0u);
  EXPECT_EQ(table->token, kPlayers * kRounds);
}

TEST(Wait, ABellStillRingsAfterASleeperWasKilled) {
  const auto table = makeSharedTable();
  Interrupt interrupt;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const Waiter waiter{table->bell, interrupt, 0, Deadline::after(60s), kSleepAtOnce};
    static_cast<void>(waiter.until([] { return false; }));
    ::_exit(0);
  }
  EXPECT_TRUE(waitForSleeper(table->bell));
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_EQ(table->bell.sleepers, 1u) << "the dead sleeper stays counted";

  std::thread ringer([&] {
    const Deadline deadline = Deadline::after(20s);
    while (table->bell.sleepers.load() < 2 && !deadline.passed()) std::this_thread::yield();
    table->token.fetch_add(1);
    table->bell.ring();
  });
  const Waiter waiter{table->bell, interrupt, 0, Deadline::after(60s), kSleepAtOnce};
  EXPECT_EQ(waiter.until([&] { return table->token.load() == 1; }), WaitResult::kReady);
  ringer.join();
}

TEST(SpinPolicy, GivesWayOnACrowdedHost) {
  const SpinPolicy alone = SpinPolicy::forRanksOnHost(1);
  const SpinPolicy crowded = SpinPolicy::forRanksOnHost(1'000'000);
  EXPECT_EQ(alone.yields, 0u);
  EXPECT_GT(crowded.yields, 0u);
  EXPECT_LT(crowded.pauses, alone.pauses);
}

TEST(SpinPolicy, PatienceIsForThoseWhoMayLook) {
  const SpinPolicy alone = SpinPolicy::forRanksOnHost(1);
  const SpinPolicy crowded = SpinPolicy::forRanksOnHost(1'000'000);
  EXPECT_GT(alone.patient().pauses, alone.pauses);
  EXPECT_EQ(alone.patient().patient().pauses, alone.patient().pauses);
  EXPECT_EQ(crowded.patient().pauses, 0u);
  EXPECT_EQ(crowded.patient().yields, crowded.yields);
  EXPECT_EQ(SpinPolicy::forMessages().patient().pauses, 0u);
}

}  // namespace
}  // namespace mooncake
