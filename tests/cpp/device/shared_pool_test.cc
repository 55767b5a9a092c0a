#include "device/shared_pool.h"

#include <future>
#include <gtest/gtest.h>
#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "device/accelerator_suite.h"
#include "device/fake/fake_devices.h"

namespace mooncake::testing {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

class SharedPoolTest : public ::testing::Test {
 protected:
  // Work of the stream that ends when the promise is set.
  void block(std::promise<void>& opens) {
    EXPECT_OK(devices->enqueue(stream, [future = opens.get_future().share()] { future.wait(); }));
  }
  void giveBack(const SharedPool::Piece& piece) {
    pool->giveBack(piece, stream);
    EXPECT_OK(devices->synchronize(stream));
  }
  ErrorCode codeOf(uint64_t user, size_t bytes) {
    const auto piece = pool->take(user, bytes);
    if (piece.ok()) giveBack(*piece);
    return piece.ok() ? ErrorCode::kOk : piece.error().code;
  }

  const std::unique_ptr<FakeDevices> devices = makeFakeDevices();
  const DeviceStream stream = devices->defaultStream(0);
  std::shared_ptr<SharedPool> pool = valueOf(SharedPool::make(*devices, 0, 8 * kMiB));
};

TEST_F(SharedPoolTest, AUserHasAsMuchAsIsLeftForTheOthers) {
  EXPECT_EQ(codeOf(1, 4 * kMiB + 1), ErrorCode::kExhausted);
  std::vector<SharedPool::Piece> pieces;
  for (int i = 0; i < 4; ++i) pieces.push_back(valueOf(pool->take(1, kMiB)));
  EXPECT_EQ(codeOf(1, 1), ErrorCode::kExhausted);
  pieces.push_back(valueOf(pool->take(2, 2 * kMiB)));
  EXPECT_EQ(codeOf(2, 1), ErrorCode::kExhausted);
  for (uint64_t user = 3; user < 12; ++user) {
    const auto more = pool->take(user, 512);
    ASSERT_TRUE(more.ok()) << "each further user finds some";
    pieces.push_back(*more);
  }
  for (const auto& piece : pieces) giveBack(piece);
  EXPECT_EQ(codeOf(1, 4 * kMiB), ErrorCode::kOk) << "all is in one piece again";
}

TEST_F(SharedPoolTest, AStreamThatMayStillUseAPieceIsWaitedFor) {
  std::promise<void> opens;
  const auto first = valueOf(pool->take(1, 4 * kMiB));
  block(opens);
  pool->giveBack(first, stream);
  EXPECT_EQ(codeOf(1, kMiB), ErrorCode::kExhausted);
  EXPECT_EQ(valueOf(pool->take(2, 2 * kMiB)).memory.data(), first.memory.data() + 4 * kMiB);
  opens.set_value();
  EXPECT_OK(devices->synchronize(stream));
  EXPECT_EQ(codeOf(1, kMiB), ErrorCode::kOk);
}

TEST_F(SharedPoolTest, PiecesDoNotOverlap) {
  std::mt19937 random(7);
  std::vector<SharedPool::Piece> held;
  size_t taken = 0;
  for (int round = 0; round < 20000; ++round) {
    if (random() % 2 == 0 && !held.empty()) {
      std::swap(held[random() % held.size()], held.back());
      pool->giveBack(held.back(), stream);
      held.pop_back();
      continue;
    }
    const size_t bytes = 1 + random() % 100000;
    const auto piece = pool->take(random() % 4, bytes);
    if (!piece.ok()) continue;
    ++taken;
    const std::byte* const start = piece->memory.data();
    EXPECT_GE(piece->memory.size(), bytes);
    EXPECT_GE(start, pool->memory().data());
    EXPECT_LE(start + piece->memory.size(), pool->memory().data() + pool->memory().size());
    for (const auto& other : held) {
      EXPECT_TRUE(start + piece->memory.size() <= other.memory.data() ||
                  other.memory.data() + other.memory.size() <= start);
    }
    held.push_back(*piece);
  }
  EXPECT_GT(taken, 1000u);
  for (const auto& piece : held) pool->giveBack(piece, stream);
  EXPECT_OK(devices->synchronize(stream));
  EXPECT_EQ(codeOf(1, 4 * kMiB), ErrorCode::kOk);
}

TEST_F(SharedPoolTest, AStreamThatCannotBeMarkedKeepsThePiece) {
  EXPECT_OK(devices->inject({.call = "createEvent"}));
  pool->giveBack(valueOf(pool->take(1, 4 * kMiB)), stream);
  EXPECT_OK(devices->synchronize(stream));
  EXPECT_EQ(codeOf(1, kMiB), ErrorCode::kExhausted);
  EXPECT_EQ(codeOf(2, 2 * kMiB), ErrorCode::kOk);
}

TEST_F(SharedPoolTest, SaysWhyThereIsNone) {
  EXPECT_OK(devices->inject({.call = "allocateShared", .code = ErrorCode::kExhausted}));
  EXPECT_EQ(SharedPool::make(*devices, 0, kMiB).error().code, ErrorCode::kExhausted);
}

}  // namespace
}  // namespace mooncake::testing
