#include "engine/memory/lease_table.h"

#include <gtest/gtest.h>
#include <latch>
#include <string>
#include <vector>

#include "ranks_in_threads.h"

namespace mooncake::test {
namespace {

TEST(LeaseTable, ALeaseThatHasEndedStaysSo) {
  auto arena = Arena::create(1 << 20);
  ASSERT_TRUE(arena.ok());
  auto table = LeaseTable::create(**arena);
  ASSERT_TRUE(table.ok());
  std::vector<LeaseTable::Remote> ended;
  for (int turn = 0; turn < 3; ++turn) {
    auto lease = (*table)->take();
    ASSERT_TRUE(lease.ok());
    const auto remote = lease->describe();
    EXPECT_TRUE(LeaseTable::liesIn(remote, (*arena)->capacity()));
    EXPECT_FALSE(LeaseTable::hasEnded(remote, (*arena)->base()));
    // The place may serve another window by now.
    for (const auto& before : ended)
      EXPECT_TRUE(LeaseTable::hasEnded(before, (*arena)->base())) << turn;
    ended.push_back(remote);
  }
}

TEST(LeaseTable, RefusesMoreThanItHolds) {
  auto arena = Arena::create(1 << 20);
  ASSERT_TRUE(arena.ok());
  auto table = LeaseTable::create(**arena);
  ASSERT_TRUE(table.ok());
  std::vector<LeaseTable::Lease> leases;
  for (uint32_t i = 0; i < LeaseTable::kMost; ++i) {
    auto lease = (*table)->take();
    ASSERT_TRUE(lease.ok());
    leases.push_back(std::move(*lease));
  }
  EXPECT_EQ((*table)->take().status().code(), ErrorCode::kExhausted);
  leases.pop_back();
  EXPECT_TRUE((*table)->take().ok());
}

TEST(LeaseTable, AWordLiesInTheArena) {
  EXPECT_TRUE(LeaseTable::liesIn({.offset = 8}, 16));
  EXPECT_FALSE(LeaseTable::liesIn({.offset = 16}, 16));
  EXPECT_FALSE(LeaseTable::liesIn({.offset = 4}, 16));
  EXPECT_FALSE(LeaseTable::liesIn({.offset = 0}, 4));
  EXPECT_FALSE(LeaseTable::liesIn({.offset = ~uint64_t(7)}, 16));
}

// A rank that has said goodbye to all may touch the parts of the others until it ends its lease.
TEST(Window, MemoryIsUsedAgainWhenNobodyTouchesItAnyMore) {
  std::latch oneIsGone(2), otherIsGone(2);
  runRanks({.size = 2, .transports = {"shm", "inproc"}}, [&](Group& group) {
    auto second = Group::createWithin(group.membership(),
                                      {.name = "second", .rank = group.rank(), .size = 2}, soon());
    ASSERT_TRUE(second.ok()) << second.error().message;
    Engine& engine = group.engine();
    const auto offset = size_t((*second)->window().local() - engine.arena().base());
    const size_t bytes = (*second)->window().bytes();
    const auto isUsedAgain = [&] {
      engine.retire({}, [] { return true; });
      auto block = engine.arena().allocate(bytes);
      // What lay before the window may be free, too: then the block begins there.
      return block.ok() && block->offset() < offset + bytes && offset < block->offset() + bytes;
    };
    if (group.rank() == 0) {
      second->reset();
      EXPECT_FALSE(isUsedAgain());
      oneIsGone.arrive_and_wait();
      otherIsGone.arrive_and_wait();
      EXPECT_TRUE(isUsedAgain());
    } else {
      oneIsGone.arrive_and_wait();
      second->reset();
      EXPECT_TRUE(isUsedAgain());
      otherIsGone.arrive_and_wait();
    }
  });
}

}  // namespace
}  // namespace mooncake::test
