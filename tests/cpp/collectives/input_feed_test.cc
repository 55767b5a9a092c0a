// Reductions of data that comes while they run.
#include "collectives/input_feed.h"

#include <algorithm>
#include <cstdint>
#include <gtest/gtest.h>
#include <optional>
#include <span>
#include <vector>

#include "collectives/collectives.h"
#include "ranks_in_threads.h"

namespace mooncake::test {
namespace {

constexpr Reduction kIntSum{DType::kInt32, ReduceKind::kSum};
constexpr size_t kCount = (size_t(5) << 20) / sizeof(int32_t) + 77;  // five pieces and a rest
constexpr size_t kBytes = kCount * sizeof(int32_t);
constexpr int32_t kNotThere = -1'000'000;

int32_t valueOf(int rank, size_t i) { return int32_t(i % 1000) * (rank + 1); }

// Writes each rank's values when they are awaited. Before that, there is other data.
class ScriptedFeed final : public InputFeed {
 public:
  ScriptedFeed(int rank, std::optional<size_t> failsAt = {})
      : data(kCount, kNotThere), rank_(rank), failsAt_(failsAt) {}

  Status await(size_t bytes) override {
    awaited.push_back(bytes);
    if (failsAt_ && bytes >= *failsAt_) return {ErrorCode::kSystem, "scripted"};
    fill(bytes / sizeof(int32_t));
    return {};
  }
  Status restart() override {
    ++restarts;
    come_ = 0;
    fill(kCount);
    return {};
  }

  Span bytes() { return std::as_writable_bytes(std::span(data)); }
  size_t wrong(int32_t factor) const {
    size_t wrong = 0;
    for (size_t i = 0; i < kCount; ++i) wrong += data[i] != valueOf(0, i) * factor;
    return wrong;
  }

  std::vector<int32_t> data;
  std::vector<size_t> awaited;
  int restarts = 0;

 private:
  void fill(size_t count) {
    for (; come_ < count; ++come_) data[come_] = valueOf(rank_, come_);
  }

  const int rank_;
  const std::optional<size_t> failsAt_;
  size_t come_ = 0;  // elements
};

TEST(InputFeedTest, PiecesAreWholeLinesAndNoneIsForLittleData) {
  for (const size_t bytes : {size_t(0), size_t(1), size_t(1) << 20})
    EXPECT_GE(fedPieceBytes(bytes), bytes);
  for (const size_t bytes : {(size_t(1) << 20) + 1, size_t(9'000'001), size_t(1) << 30}) {
    EXPECT_LT(fedPieceBytes(bytes), bytes);
    EXPECT_EQ(fedPieceBytes(bytes) % 64, 0u);
    EXPECT_LE(fedPieceBytes(bytes), size_t(32) << 20);
  }
}

TEST(InputFeedTest, NoPieceIsReadBeforeItIsThere) {
  for (const char* transport : {"shm", "tcp", "inproc"}) {
    runRanks({.size = 3, .transports = {transport}}, [&](Group& group) {
      ScriptedFeed feed(group.rank());
      const Status status = allreduce(group, feed.bytes(), kIntSum, soon(), &feed);
      ASSERT_TRUE(status.ok()) << status.error().message;
      EXPECT_EQ(feed.wrong(6), 0u);
      EXPECT_EQ(feed.awaited.size(), 6u);
      EXPECT_TRUE(std::ranges::is_sorted(feed.awaited));
      EXPECT_EQ(feed.awaited.back(), kBytes);
      EXPECT_EQ(feed.restarts, 0);
    });
  }
}

TEST(InputFeedTest, OnlyTheRootHasTheSum) {
  runRanks({.size = 3, .transports = {"shm"}}, [&](Group& group) {
    ScriptedFeed feed(group.rank());
    ASSERT_TRUE(reduce(group, feed.bytes(), kIntSum, 1, soon(), &feed).ok());
    EXPECT_EQ(feed.wrong(group.rank() == 1 ? 6 : group.rank() + 1), 0u);
  });
}

// A rank leaves between two pieces: all pieces are those of the survivors.
TEST(InputFeedTest, ACallHasOneSetOfContributors) {
  for (const char* transport : {"shm", "tcp", "inproc"}) {
    for (const size_t piece : {size_t(2), size_t(4), size_t(6)}) {
      runRanks({.size = 3, .transports = {transport}}, [&](Group& group) {
        const bool leaves = group.rank() == 1;
        ScriptedFeed feed(group.rank(),
                          leaves ? std::optional(std::min(piece << 20, kBytes)) : std::nullopt);
        const Status status = allreduce(group, feed.bytes(), kIntSum, soon(), &feed);
        EXPECT_EQ(status.ok(), !leaves);
        if (leaves) return;  // its engine says goodbye
        EXPECT_EQ(feed.wrong(4), 0u) << transport << ", piece " << piece;
        EXPECT_EQ(feed.restarts, 1);
        EXPECT_EQ(group.lastView->active, (std::vector{0, 2}));
      });
    }
  }
}

// One rank has all data at once. Its pieces would be others.
TEST(InputFeedTest, AllRanksHaveAFeedOrNone) {
  runRanks({.size = 2, .transports = {"shm"}}, [&](Group& group) {
    ScriptedFeed feed(group.rank());
    ASSERT_TRUE(feed.await(kBytes).ok());
    const Status status =
        allreduce(group, feed.bytes(), kIntSum, soon(), group.rank() == 0 ? &feed : nullptr);
    EXPECT_EQ(status.code(), ErrorCode::kMismatch) << status.error().message;
  });
}

}  // namespace
}  // namespace mooncake::test
