// all_to_all on data that comes while it runs.
#include <algorithm>
#include <cstdint>
#include <gtest/gtest.h>
#include <optional>
#include <string>
#include <vector>

#include "collectives/collectives.h"
#include "ranks_in_threads.h"

namespace mooncake::test {
namespace {

constexpr int kRanks = 3;
constexpr std::byte kNotThere{0xee};

// Bytes from each rank to each.
using Splits = std::vector<std::vector<size_t>>;
constexpr size_t kMiB = size_t(1) << 20;
const Splits kUneven = {
    {5 * kMiB + 24, 0, 3 * kMiB}, {kMiB + 8, 2 * kMiB, 16}, {7 * kMiB + 40, 4 * kMiB, 0}};
// The input of rank 1 is below the length from which one comes in pieces, and rank 2's is empty.
const Splits kOneLarge = {{0, 3 * kMiB + 8, 4 * kMiB}, {40, 64, 8}, {0, 0, 0}};

std::byte valueAt(int from, int to, size_t i) {
  return static_cast<std::byte>((from * 31 + to * 7 + int(i % 251)) % 233);
}

// Writes each part when it is awaited. Before that, there is other data.
class Parts final : public InputFeed {
 public:
  Parts(int rank, const Splits& splits, std::optional<size_t> failsAt = {})
      : rank_(rank), failsAt_(failsAt) {
    for (int r = 0; r < kRanks; ++r) {
      sent.emplace_back(splits[rank][r], kNotThere);
      received.emplace_back(splits[r][rank], kNotThere);
    }
    for (int r = 0; r < kRanks; ++r) {
      inputs.emplace_back(sent[r]);
      outputs.emplace_back(received[r]);
    }
  }

  Status await(size_t bytes) override {
    awaited.push_back(bytes);
    if (failsAt_ && bytes >= *failsAt_) return {ErrorCode::kSystem, "scripted"};
    for (int to = 0; to < kRanks; ++to) {
      for (size_t i = come_; i < std::min(bytes, sent[to].size()); ++i)
        sent[to][i] = valueAt(rank_, to, i);
    }
    come_ = std::max(come_, bytes);
    return {};
  }
  Status restart() override { return {ErrorCode::kSystem, "no input changes"}; }

  size_t wrong(const std::vector<int>& active = {0, 1, 2}) const {
    size_t wrong = 0;
    for (int from = 0; from < kRanks; ++from) {
      const bool isIn = std::ranges::count(active, from) > 0;
      for (size_t i = 0; i < received[from].size(); ++i)
        wrong += received[from][i] != (isIn ? valueAt(from, rank_, i) : std::byte{});
    }
    return wrong;
  }
  bool isUntouched() const {
    return std::ranges::all_of(received, [](const Bytes& part) {
      return size_t(std::ranges::count(part, kNotThere)) == part.size();
    });
  }

  std::vector<Bytes> sent, received;
  std::vector<ConstSpan> inputs;
  std::vector<Span> outputs;
  std::vector<size_t> awaited;

 private:
  const int rank_;
  const std::optional<size_t> failsAt_;
  size_t come_ = 0;
};

Status call(Group& group, Parts& parts, bool isFed = true) {
  if (!isFed) EXPECT_TRUE(parts.await(size_t(-1)).ok());
  return alltoall(group, parts.inputs, parts.outputs, DType::kUInt8, soon(),
                  isFed ? &parts : nullptr);
}

TEST(AlltoallFeedTest, PiecesAreWholeLinesAndNoneIsForLittleData) {
  for (const size_t longest : {size_t(0), size_t(1), kMiB, 2 * kMiB - 1})
    EXPECT_GT(splitPieceBytesOf(longest, longest), longest);
  for (const size_t longest : {2 * kMiB, 9 * kMiB + 3, size_t(1) << 40}) {
    for (const size_t all : {longest, 3 * longest + 1}) {
      const size_t piece = splitPieceBytesOf(longest, all);
      EXPECT_LT(piece, longest);
      EXPECT_EQ(piece % 64, 0u);
      EXPECT_GE(piece * kMostSplitPieces, longest);
    }
  }
}

TEST(AlltoallFeedTest, NoPieceIsReadBeforeItIsThere) {
  for (const char* transport : {"shm", "tcp", "inproc"}) {
    for (const Splits& splits : {kUneven, kOneLarge}) {
      runRanks({.size = kRanks, .transports = {transport}}, [&](Group& group) {
        for (int round = 0; round < 2; ++round) {
          Parts parts(group.rank(), splits);
          const Status status = call(group, parts);
          ASSERT_TRUE(status.ok()) << status.error().message;
          EXPECT_EQ(parts.wrong(), 0u) << transport;
          EXPECT_GE(parts.awaited.size(), 4u);
          EXPECT_LE(parts.awaited.size(), kMostSplitPieces);
          EXPECT_TRUE(std::ranges::is_sorted(parts.awaited));
        }
      });
    }
  }
}

// The others have CPU tensors, or little data.
TEST(AlltoallFeedTest, RanksWithoutAFeedTakePart) {
  for (const char* transport : {"shm", "tcp"}) {
    for (const Splits& splits : {kUneven, kOneLarge}) {
      for (const unsigned fed : {1u, 2u, 5u}) {
        runRanks({.size = kRanks, .transports = {transport}}, [&](Group& group) {
          Parts parts(group.rank(), splits);
          const Status status = call(group, parts, (fed >> group.rank() & 1) != 0);
          ASSERT_TRUE(status.ok()) << status.error().message;
          EXPECT_EQ(parts.wrong(), 0u) << transport << fed;
        });
      }
    }
  }
}

// All ranks choose by the longest part, even if its rank has all of its data.
TEST(AlltoallFeedTest, ThereAreFewPieces) {
  const Splits splits = {{0, 2 * kMiB, 0}, {0, 0, 64 * kMiB}, {0, 0, 0}};
  runRanks({.size = kRanks, .transports = {"shm"}}, [&](Group& group) {
    Parts parts(group.rank(), splits);
    ASSERT_TRUE(call(group, parts, group.rank() == 0).ok());
    EXPECT_EQ(parts.wrong(), 0u);
    if (group.rank() == 0) EXPECT_LE(parts.awaited.size(), kMostSplitPieces);
  });
}

TEST(AlltoallFeedTest, AMisfitChangesNothingAndNamesBothRanks) {
  for (const char* transport : {"shm", "tcp"}) {
    for (const unsigned fed : {7u, 2u}) {
      runRanks({.size = kRanks, .transports = {transport}, .eagerBytes = 1}, [&](Group& group) {
        Splits splits = kUneven;
        if (group.rank() == 2) splits[2][1] += 8;
        Parts parts(group.rank(), splits);
        const bool isFed = (fed >> group.rank() & 1) != 0;
        const Status status = call(group, parts, isFed);
        EXPECT_EQ(status.code(), ErrorCode::kMismatch);
        const std::string& text = status.error().message;
        if (group.rank() != 0 || std::string(transport) == "shm")
          EXPECT_NE(text.find("rank 2 sends 4194312 bytes to rank 1"), std::string::npos) << text;
        EXPECT_TRUE(parts.isUntouched());
        if (isFed) EXPECT_TRUE(parts.awaited.empty());
        Parts again(group.rank(), kOneLarge);
        ASSERT_TRUE(call(group, again, isFed).ok());
        EXPECT_EQ(again.wrong(), 0u);
      });
    }
  }
}

// A rank leaves between two pieces: all data are those of the survivors, also of earlier pieces.
TEST(AlltoallFeedTest, ACallHasOneSetOfContributors) {
  for (const char* transport : {"shm", "tcp", "inproc"}) {
    for (const int leaver : {0, 2}) {
      for (const size_t at : {size_t(1), 3 * kMiB, 7 * kMiB + 40}) {
        runRanks({.size = kRanks, .transports = {transport}}, [&](Group& group) {
          const bool leaves = group.rank() == leaver;
          Parts parts(group.rank(), kUneven, leaves ? std::optional(at) : std::nullopt);
          const Status status = call(group, parts, group.rank() != 1);
          EXPECT_EQ(status.ok(), !leaves);
          if (leaves) return;  // its engine says goodbye
          EXPECT_EQ(group.lastView->active.size(), 2u);
          EXPECT_EQ(parts.wrong(group.lastView->active), 0u) << transport << leaver << at;
        });
      }
    }
  }
}

}  // namespace
}  // namespace mooncake::test
