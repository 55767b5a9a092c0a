// Operations on data that comes while they run.
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

int32_t valueOf(int rank, size_t i, size_t part = 0) {
  return int32_t((i + 17 * part) % 1000) * (rank + 1);
}

// Writes each rank's values when they are awaited. Before that, there is other data.
class ScriptedFeed final : public InputFeed {
 public:
  ScriptedFeed(int rank, std::optional<size_t> failsAt = {}, size_t parts = 1)
      : data(parts * kCount, kNotThere), rank_(rank), failsAt_(failsAt) {}

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
    for (; come_ < count; ++come_) {
      for (size_t part = 0; part * kCount < data.size(); ++part)
        data[part * kCount + come_] = valueOf(rank_, come_, part);
    }
  }

  const int rank_;
  const std::optional<size_t> failsAt_;
  size_t come_ = 0;  // elements
};

TEST(InputFeedTest, PiecesAreWholeLinesAndNoneIsForLittleData) {
  for (const size_t parts : {size_t(1), size_t(3), size_t(64)}) {
    for (const size_t bytes : {size_t(0), size_t(1), (size_t(1) << 20) / parts})
      EXPECT_GE(fedPieceBytes(bytes, parts), bytes) << parts;
    for (const size_t bytes : {(size_t(1) << 20) + 1, size_t(9'000'001), size_t(1) << 30}) {
      const size_t piece = fedPieceBytes(bytes, parts);
      EXPECT_LT(piece, bytes);
      EXPECT_EQ(piece % 64, 0u);
      EXPECT_LE((piece - 64) * parts, size_t(32) << 20);
    }
  }
  EXPECT_GT(fedPieceBytes(1, 1 << 20), 0u);
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

// The verbs that leave their input as it is. The root is rank 1.
struct Verb {
  const char* name;
  bool hasRoot;
  bool hasParts;  // the input has one part for each rank
  Status (*run)(Group& group, ScriptedFeed& data, std::vector<int32_t>& output, InputFeed* feed);
  int32_t (*expected)(int rank, const std::vector<int>& active, size_t i);
};

constexpr int kRoot = 1;
constexpr int kRanks = 3;
const std::vector<int> kAll{0, 1, 2};

std::vector<Span> partsOf(std::span<int32_t> all) {
  std::vector<Span> parts;
  for (size_t at = 0; at < all.size(); at += kCount)
    parts.push_back(std::as_writable_bytes(all.subspan(at, kCount)));
  return parts;
}

std::vector<ConstSpan> constPartsOf(std::span<int32_t> all) {
  const std::vector<Span> parts = partsOf(all);
  return {parts.begin(), parts.end()};
}

int32_t gathered(int, const std::vector<int>& active, size_t i) {
  const int from = int(i / kCount);
  return std::ranges::count(active, from) ? valueOf(from, i % kCount) : 0;
}

const Verb kVerbs[] = {
    {"broadcast", true, false,
     [](Group& group, ScriptedFeed& data, std::vector<int32_t>& output, InputFeed* feed) {
       const bool isRoot = group.rank() == kRoot;
       const Span bytes = isRoot ? data.bytes() : std::as_writable_bytes(std::span(output));
       const Status status = broadcast(group, bytes, DType::kInt32, kRoot, soon(), feed);
       if (isRoot) output = data.data;
       return status;
     },
     [](int, const std::vector<int>&, size_t i) { return valueOf(kRoot, i); }},
    {"all_gather", false, false,
     [](Group& group, ScriptedFeed& data, std::vector<int32_t>& output, InputFeed* feed) {
       output.resize(kRanks * kCount);
       return allgather(group, data.bytes(), partsOf(output), DType::kInt32, soon(), feed);
     },
     gathered},
    {"gather", true, false,
     [](Group& group, ScriptedFeed& data, std::vector<int32_t>& output, InputFeed* feed) {
       output.resize(group.rank() == kRoot ? kRanks * kCount : 0);
       return gather(group, data.bytes(), partsOf(output), DType::kInt32, kRoot, soon(), feed);
     },
     gathered},
    {"scatter", true, true,
     [](Group& group, ScriptedFeed& data, std::vector<int32_t>& output, InputFeed* feed) {
       std::vector<ConstSpan> inputs;
       if (group.rank() == kRoot) inputs = constPartsOf(data.data);
       return scatter(group, inputs, std::as_writable_bytes(std::span(output)), DType::kInt32,
                      kRoot, soon(), feed);
     },
     [](int rank, const std::vector<int>&, size_t i) { return valueOf(kRoot, i, size_t(rank)); }},
    {"reduce_scatter", false, true,
     [](Group& group, ScriptedFeed& data, std::vector<int32_t>& output, InputFeed* feed) {
       return reduceScatter(group, data.bytes(), std::as_writable_bytes(std::span(output)), kIntSum,
                            soon(), feed);
     },
     [](int rank, const std::vector<int>& active, size_t i) {
       int32_t sum = 0;
       for (const int from : active) sum += valueOf(from, i, size_t(rank));
       return sum;
     }},
};

ScriptedFeed feedOf(const Verb& verb, int rank, std::optional<size_t> failsAt = {}) {
  return {rank, failsAt, verb.hasParts ? size_t(kRanks) : 1};
}

size_t wrongIn(const Verb& verb, int rank, const std::vector<int>& active,
               const std::vector<int32_t>& output) {
  size_t wrong = 0;
  for (size_t i = 0; i < output.size(); ++i) wrong += output[i] != verb.expected(rank, active, i);
  return wrong;
}

TEST(InputFeedTest, EachVerbTakesItsInputAsItComes) {
  for (const Verb& verb : kVerbs) {
    for (const char* transport : {"shm", "tcp"}) {
      runRanks({.size = kRanks, .transports = {transport}}, [&](Group& group) {
        ScriptedFeed feed = feedOf(verb, group.rank());
        std::vector<int32_t> output(kCount, kNotThere);
        const Status status = verb.run(group, feed, output, &feed);
        ASSERT_TRUE(status.ok()) << verb.name << ": " << status.error().message;
        EXPECT_EQ(wrongIn(verb, group.rank(), kAll, output), 0u) << verb.name << transport;
        EXPECT_GE(feed.awaited.size(), 6u);
        EXPECT_TRUE(std::ranges::is_sorted(feed.awaited));
        EXPECT_EQ(feed.awaited.back(), kBytes);
        EXPECT_EQ(feed.restarts, 0);
      });
    }
  }
}

// A rank leaves between two pieces. Without the root there is no result; all survivors know that.
TEST(InputFeedTest, EachVerbHasOneSetOfContributors) {
  for (const Verb& verb : kVerbs) {
    for (const int leaver : {kRoot, 2}) {
      for (const size_t at : {kBytes / 3, kBytes}) {
        runRanks({.size = kRanks, .transports = {"shm"}}, [&](Group& group) {
          const bool leaves = group.rank() == leaver;
          ScriptedFeed feed = feedOf(verb, group.rank(), leaves ? std::optional(at) : std::nullopt);
          std::vector<int32_t> output(kCount, kNotThere);
          const Status status = verb.run(group, feed, output, &feed);
          if (leaves || (verb.hasRoot && leaver == kRoot)) {
            EXPECT_EQ(status.code(), leaves ? ErrorCode::kSystem : ErrorCode::kPeerLost)
                << verb.name << ": " << status.error().message;
            return;
          }
          ASSERT_TRUE(status.ok()) << verb.name << ": " << status.error().message;
          const std::vector<int>& active = group.lastView->active;
          EXPECT_EQ(active.size(), 2u);
          EXPECT_EQ(wrongIn(verb, group.rank(), active, output), 0u) << verb.name;
          EXPECT_EQ(feed.restarts, 0) << verb.name;
        });
      }
    }
  }
}

TEST(InputFeedTest, EachVerbHasAFeedOnAllRanksOrNone) {
  for (const Verb& verb : kVerbs) {
    runRanks({.size = kRanks, .transports = {"shm"}}, [&](Group& group) {
      ScriptedFeed feed = feedOf(verb, group.rank());
      ASSERT_TRUE(feed.await(kBytes).ok());
      std::vector<int32_t> output(kCount, kNotThere);
      const Status status = verb.run(group, feed, output, group.rank() == 0 ? &feed : nullptr);
      EXPECT_EQ(status.code(), ErrorCode::kMismatch) << verb.name;
    });
  }
}

}  // namespace
}  // namespace mooncake::test
