// Over messages, all_to_all sends to each peer only the part that is for it.
#include <gtest/gtest.h>
#include <latch>

#include "collectives/collectives.h"
#include "ranks_in_threads.h"
#include "wires/stream/wire.h"

namespace mooncake::test {
namespace {

constexpr int kRanks = 12;

Ranks overMessages() {
  // The smallest slots, and very few heartbeats.
  return {.size = kRanks,
          .transports = {"tcp"},
          .eagerBytes = 1,
          .failureTimeout = std::chrono::seconds(60)};
}

std::byte valueAt(int from, int to, size_t index) {
  return static_cast<std::byte>(size_t(from) * 31 + size_t(to) * 7 + index);
}

// All parts have the same length, except for the pairs of `odd`: these have one byte more.
struct Parts {
  Parts(int rank, size_t bytes, std::function<bool(int from, int to)> odd) {
    for (int r = 0; r < kRanks; ++r) {
      Bytes& to = sent.emplace_back(bytes + odd(rank, r));
      for (size_t i = 0; i < to.size(); ++i) to[i] = valueAt(rank, r, i);
      received.emplace_back(bytes + odd(r, rank), std::byte{0xee});
    }
    inputs.assign(sent.begin(), sent.end());
    outputs.assign(received.begin(), received.end());
  }
  bool areRight(int rank) const {
    for (int from = 0; from < kRanks; ++from) {
      for (size_t i = 0; i < received[from].size(); ++i) {
        if (received[from][i] != valueAt(from, rank, i)) return false;
      }
    }
    return true;
  }
  std::vector<Bytes> sent, received;
  std::vector<ConstSpan> inputs;
  std::vector<Span> outputs;
};

uint64_t receivedBytes(const Group& group) {
  uint64_t bytes = 0;
  for (int r = 0; r < kRanks; ++r) {
    if (r != group.rank()) bytes += group.window().peer(r)->channel->lifeSigns();
  }
  return bytes;
}

TEST(AlltoallOverMessages, SendsToEachPeerItsOwnPart) {
  constexpr size_t kFrame = wire::kHeaderBytes, kOfSlot = kSlotHeaderBytes - 72;
  constexpr size_t kSums = 16, kLengths = 16;
  // For each peer: one put of the slot, and one of `done`.
  constexpr size_t kOverhead = kFrame + kOfSlot + kSums + kLengths + kFrame;
  struct Case {
    size_t bytes, expected;
  };
  const Case cases[] = {
      {64, kOverhead + 64},
      // Also a region, a request for our data, one piece, and a frame with the result.
      {2000, kOverhead + sizeof(RemoteRegion) + kFrame + kFrame + 2000 + kFrame},
  };
  std::latch began(kRanks), looked(kRanks), began2(kRanks), looked2(kRanks);
  std::latch ended(kRanks), ended2(kRanks), done(kRanks);
  std::latch* const stages[2][3] = {{&began, &looked, &ended}, {&began2, &looked2, &ended2}};
  runRanks(overMessages(), [&](Group& group) {
    for (int i = 0; i < 2; ++i) {
      Parts data(group.rank(), cases[i].bytes, [](int, int) { return false; });
      stages[i][0]->arrive_and_wait();
      const uint64_t before = receivedBytes(group);
      stages[i][1]->arrive_and_wait();
      const Status status = alltoall(group, data.inputs, data.outputs, DType::kUInt8, soon());
      stages[i][2]->arrive_and_wait();
      ASSERT_TRUE(status.ok()) << status.error().message;
      EXPECT_TRUE(data.areRight(group.rank()));
      const uint64_t received = receivedBytes(group) - before;
      EXPECT_GE(received, (kRanks - 1) * cases[i].expected);
      EXPECT_LE(received, (kRanks - 1) * (cases[i].expected + kFrame)) << "a beat each, at most";
    }
    done.arrive_and_wait();  // a rank that leaves sends messages
  });
}

// Every rank gets the error; the two ranks of the pair also get the numbers.
TEST(AlltoallOverMessages, AMisfitIsEverybodysError) {
  for (const size_t bytes : {64, 2000}) {
    runRanks(overMessages(), [&](Group& group) {
      Parts data(group.rank(), bytes,
                 [&](int from, int to) { return group.rank() == 3 && from == 3 && to == 5; });
      const Status status = alltoall(group, data.inputs, data.outputs, DType::kUInt8, soon());
      ASSERT_EQ(status.code(), ErrorCode::kMismatch);
      const std::string expected = group.rank() == 3 || group.rank() == 5
                                       ? "rank 3 sends " + std::to_string(bytes + 1) +
                                             " bytes to rank 5, which expects " +
                                             std::to_string(bytes)
                                       : "between other ranks";
      EXPECT_NE(status.error().message.find(expected), std::string::npos) << status.error().message;
      // The group goes on.
      Parts again(group.rank(), bytes, [](int from, int to) { return (from + to) % 3 == 0; });
      EXPECT_TRUE(alltoall(group, again.inputs, again.outputs, DType::kUInt8, soon()).ok());
      EXPECT_TRUE(again.areRight(group.rank()));
    });
  }
}

}  // namespace
}  // namespace mooncake::test
