#include "device/pinned_pool.h"

#include <algorithm>
#include <future>
#include <gtest/gtest.h>
#include <memory>
#include <utility>
#include <vector>

#include "device/accelerator_suite.h"
#include "device/fake/fake_devices.h"

namespace mooncake::testing {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

class PinnedPoolTest : public ::testing::Test {
 protected:
  // Work of the stream that ends when the promise is set.
  void block(std::promise<void>& opens) {
    EXPECT_OK(devices->enqueue(stream, [future = opens.get_future().share()] { future.wait(); }));
  }
  std::byte* takeAndGiveBack(size_t bytes) {
    auto piece = valueOf(pool.take(bytes));
    std::byte* const start = piece.memory.data();
    pool.giveBack(std::move(piece), stream);
    return start;
  }

  const std::unique_ptr<FakeDevices> devices = makeFakeDevices();
  const DeviceStream stream = devices->defaultStream(0);
  PinnedPool pool{*devices, 0, 4 * kMiB};
};

TEST_F(PinnedPoolTest, APieceServesAgain) {
  std::byte* const first = takeAndGiveBack(kMiB - 5);
  EXPECT_OK(devices->synchronize(stream));
  EXPECT_OK(devices->inject({.call = "allocatePinned", .times = 1000}));
  for (const size_t bytes : {kMiB, kMiB - 7, kMiB - 4096}) {
    EXPECT_EQ(takeAndGiveBack(bytes), first);
    EXPECT_OK(devices->synchronize(stream));
  }
}

TEST_F(PinnedPoolTest, APieceHasWhatWasAskedForAndLittleMore) {
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{4096}, size_t{4097}, kMiB, kMiB + 1,
                             3 * kMiB - 1, 3 * kMiB + 1}) {
    auto piece = valueOf(pool.take(bytes));
    EXPECT_GE(piece.memory.size(), bytes);
    EXPECT_LE(piece.memory.size(), std::max<size_t>(4096, bytes + bytes / 8 + 1));
    EXPECT_EQ(valueOf(devices->placeOf(piece.memory.data())).kind, MemoryKind::kPinned);
    pool.giveBack(std::move(piece), stream);
  }
}

TEST_F(PinnedPoolTest, AStreamThatMayStillUseAPieceIsWaitedFor) {
  std::promise<void> opens;
  block(opens);
  std::byte* const first = takeAndGiveBack(kMiB);
  auto second = valueOf(pool.take(kMiB));
  EXPECT_NE(second.memory.data(), first);
  opens.set_value();
  EXPECT_OK(devices->synchronize(stream));
  EXPECT_EQ(takeAndGiveBack(kMiB), first);
  pool.giveBack(std::move(second), stream);
}

TEST_F(PinnedPoolTest, WhatWasUsedLongestAgoIsFreedBeyondTheLimit) {
  std::vector<PinnedPool::Piece> pieces;
  for (int i = 0; i < 6; ++i) pieces.push_back(valueOf(pool.take(kMiB)));
  std::byte* const first = pieces.front().memory.data();
  std::byte* const last = pieces.back().memory.data();
  for (auto& piece : pieces) {
    pool.giveBack(std::move(piece), stream);
    EXPECT_OK(devices->synchronize(stream));
  }
  EXPECT_EQ(pool.idleBytes(), 4 * kMiB);
  EXPECT_EQ(valueOf(devices->placeOf(first)).kind, MemoryKind::kHost);  // no more
  EXPECT_EQ(valueOf(devices->placeOf(last)).kind, MemoryKind::kPinned);
}

TEST_F(PinnedPoolTest, WhatAStreamMayStillUseIsNotFreed) {
  std::promise<void> opens;
  block(opens);
  std::vector<PinnedPool::Piece> pieces;
  for (int i = 0; i < 6; ++i) pieces.push_back(valueOf(pool.take(kMiB)));
  std::byte* const first = pieces.front().memory.data();
  for (auto& piece : pieces) pool.giveBack(std::move(piece), stream);
  EXPECT_EQ(valueOf(devices->placeOf(first)).kind, MemoryKind::kPinned);
  EXPECT_EQ(pool.idleBytes(), 6 * kMiB);
  opens.set_value();
  EXPECT_OK(devices->synchronize(stream));
  takeAndGiveBack(1);
  EXPECT_LE(pool.idleBytes(), 4 * kMiB);
}

TEST_F(PinnedPoolTest, AFailedAllocationIsAnError) {
  EXPECT_OK(devices->inject({.call = "allocatePinned", .code = ErrorCode::kExhausted}));
  EXPECT_EQ(pool.take(kMiB).status().code(), ErrorCode::kExhausted);
  takeAndGiveBack(kMiB);
}

TEST_F(PinnedPoolTest, WithoutAMarkAPieceIsFreed) {
  EXPECT_OK(devices->inject({.call = "createEvent", .times = 1}));
  takeAndGiveBack(kMiB);
  EXPECT_EQ(pool.idleBytes(), 0u);
}

}  // namespace
}  // namespace mooncake::testing
