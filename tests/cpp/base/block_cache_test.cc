#include "base/block_cache.h"

#include <cstring>
#include <gtest/gtest.h>
#include <thread>
#include <vector>

namespace mooncake::test {
namespace {

constexpr size_t kMiB = size_t(1) << 20;

TEST(BlockCache, ABlockServesAgain) {
  const auto cache = BlockCache::make(64 * kMiB);
  auto first = cache->take(5 * kMiB);
  ASSERT_NE(first, nullptr);
  std::memset(first.get(), 1, 5 * kMiB);
  const std::byte* const where = first.get();
  auto second = cache->take(5 * kMiB);
  EXPECT_NE(second.get(), where) << "the first one is in use";
  first.reset();
  EXPECT_GE(cache->idleBytes(), 5 * kMiB);
  // A little larger, and not much smaller.
  EXPECT_NE(cache->take(kMiB).get(), where);
  EXPECT_EQ(cache->take(5 * kMiB + kMiB / 2).get(), where);
  EXPECT_EQ(cache->take(4 * kMiB).get(), where);
}

TEST(BlockCache, KeepsNoMoreThanItsLimit) {
  const auto cache = BlockCache::make(16 * kMiB);
  std::vector<std::shared_ptr<std::byte>> taken;
  for (int i = 0; i < 5; ++i) taken.push_back(cache->take(4 * kMiB));
  taken.push_back(cache->take(100 * kMiB));
  taken.clear();
  EXPECT_LE(cache->idleBytes(), 16 * kMiB);
  EXPECT_EQ(cache->take(0).use_count(), 1) << "no bytes are a block, too";
}

TEST(BlockCache, BlocksOutliveTheCachesOwner) {
  auto cache = BlockCache::make(16 * kMiB);
  auto block = cache->take(2 * kMiB);
  const std::weak_ptr<BlockCache> seen = cache;
  cache.reset();
  std::memset(block.get(), 3, 2 * kMiB);
  block.reset();
  EXPECT_TRUE(seen.expired());
}

TEST(BlockCache, CloseFreesTheIdleBlocks) {
  const auto cache = BlockCache::make(64 * kMiB);
  auto kept = cache->take(4 * kMiB);
  cache->take(8 * kMiB).reset();
  EXPECT_GE(cache->idleBytes(), 8 * kMiB);
  cache->close();
  EXPECT_EQ(cache->idleBytes(), 0u);
  std::memset(kept.get(), 3, 4 * kMiB);
  kept.reset();
  EXPECT_EQ(cache->idleBytes(), 0u) << "a block that comes back is freed, too";
  EXPECT_NE(cache->take(kMiB), nullptr);
}

TEST(BlockCache, OfSeveralThreads) {
  const auto cache = BlockCache::make(8 * kMiB);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        const size_t bytes = (1 + size_t(i + t) % 3) * kMiB;
        const auto block = cache->take(bytes);
        block.get()[0] = block.get()[bytes - 1] = std::byte(t);
        EXPECT_EQ(block.get()[0], std::byte(t));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_LE(cache->idleBytes(), 8 * kMiB);
}

}  // namespace
}  // namespace mooncake::test
