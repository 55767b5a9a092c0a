#include "transfer/slot_pool.h"

#include <atomic>
#include <gtest/gtest.h>
#include <memory>
#include <thread>
#include <vector>

namespace mooncake::transfer {
namespace {

using Slot = SlotPool::Slot;
using namespace std::chrono_literals;

constexpr size_t kSize = 64;

size_t takeAll(SlotPool& pool, SlotShare& share) {
  size_t taken = 0;
  while (pool.tryTake(share) != Slot::kNone) ++taken;
  return taken;
}

TEST(SlotPool, ASegmentHasHalfOfItAtMost) {
  SlotPool pool(kSize);
  SlotShare one, other;
  EXPECT_EQ(takeAll(pool, one), kSize / 2);
  EXPECT_EQ(takeAll(pool, other), kSize / 2);
  pool.give(one, Slot::kCounted);
  EXPECT_EQ(pool.tryTake(other), Slot::kNone);
  EXPECT_EQ(pool.tryTake(one), Slot::kCounted);
}

TEST(SlotPool, ASegmentMayAlwaysHaveAFew) {
  SlotPool pool(kSize);
  std::vector<SlotShare> shares(100);
  for (size_t i = 0; i < shares.size(); ++i)
    EXPECT_EQ(takeAll(pool, shares[i]), i < 2 ? kSize / 2 : kSize / 16);
  // Slots beyond the pool's size must be returned before the pool gives new ones.
  for (size_t i = 0; i < kSize / 2; ++i) pool.give(shares[0], Slot::kCounted);
  EXPECT_EQ(takeAll(pool, shares[1]), 0u);
  EXPECT_EQ(takeAll(pool, shares[2]), 0u);
  EXPECT_EQ(takeAll(pool, shares[0]), kSize / 16);
}

TEST(SlotPool, TheSmallestPoolLetsOneInForEachSegment) {
  SlotPool pool(1);
  SlotShare one, other;
  EXPECT_EQ(takeAll(pool, one), 1u);
  EXPECT_EQ(takeAll(pool, other), 1u);
}

TEST(SlotPool, AStalledSegmentHoldsNothing) {
  SlotPool pool(kSize);
  SlotShare stalled, other, third;
  const auto begun = Clock::now();
  pool.succeeded(stalled, begun);
  std::vector<Slot> slots(kSize / 2, Slot::kCounted);
  EXPECT_EQ(takeAll(pool, stalled), slots.size());
  for (Slot& slot : slots) {
    pool.giveBack(stalled, slot, begun + SlotPool::kPatience + 1ms);
    EXPECT_EQ(slot, Slot::kUncounted);
  }
  EXPECT_EQ(takeAll(pool, other), kSize / 2);
  EXPECT_EQ(takeAll(pool, third), kSize / 2);
  // The transfers are still under way, so the segment gets no more of them.
  EXPECT_EQ(pool.tryTake(stalled), Slot::kNone);
  pool.give(stalled, slots.back());
  EXPECT_EQ(pool.tryTake(stalled), Slot::kUncounted);
  pool.succeeded(stalled, begun + 1s);
  pool.give(stalled, Slot::kUncounted);
  EXPECT_EQ(pool.tryTake(stalled), Slot::kNone);  // the pool is empty, its share used
  pool.give(other, Slot::kCounted);
  EXPECT_EQ(pool.tryTake(stalled), Slot::kCounted);
}

// A segment has a long transfer, and short ones that end.
TEST(SlotPool, ASegmentThatGoesOnIsNotStalled) {
  SlotPool pool(kSize);
  SlotShare share;
  Slot slot = pool.tryTake(share);
  const auto begun = Clock::now();
  pool.succeeded(share, begun + SlotPool::kPatience);
  pool.giveBack(share, slot, begun + SlotPool::kPatience + 1ms);
  EXPECT_EQ(pool.tryTake(share), Slot::kCounted);
}

// Each rest ends when another thread gives a slot. Otherwise the test does not end.
TEST(SlotPool, NobodyRestsBesideAFreeSlot) {
  constexpr size_t kThreads = 4, kRounds = 5'000;
  SlotPool pool(2);
  SlotShare share;  // has one slot at a time
  std::atomic<int> inside{0};
  const Interrupt never;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      Doorbell bell;
      for (size_t round = 0; round < kRounds; ++round) {
        Slot slot = pool.tryTake(share);
        while (slot == Slot::kNone) {
          const SlotPool::Rest rest(pool, bell);
          slot = pool.tryTake(share);
          if (slot != Slot::kNone) break;
          const Waiter waiter{bell, never, 0, Deadline::after(60s), SpinPolicy::forMessages()};
          EXPECT_EQ(waiter.until([&] { return rest.hasNews(); }), WaitResult::kReady);
        }
        EXPECT_EQ(inside.fetch_add(1), 0);
        inside.fetch_sub(1);
        pool.give(share, slot);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace mooncake::transfer
