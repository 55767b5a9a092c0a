// Windows on every wire, with ranks as threads.
#include "collectives/one_sided.h"

#include <atomic>
#include <cstring>
#include <gtest/gtest.h>
#include <latch>
#include <thread>

#include "collectives/collectives.h"
#include "collectives/point_to_point.h"
#include "collectives/rma_window.h"
#include "ranks_in_threads.h"

namespace mooncake::test {
namespace {

using namespace std::chrono_literals;

struct Wire {
  const char* name;
  std::vector<std::string> transports;
  bool crossMemoryAttach = true;
};

class OneSidedTest : public testing::TestWithParam<std::tuple<Wire, int>> {
 protected:
  Ranks ranks() const {
    const auto& [wire, size] = GetParam();
    return {.size = size,
            .transports = wire.transports,
            .crossMemoryAttach = wire.crossMemoryAttach,
            .eagerBytes = 8 << 10,
            .failureTimeout = 20s};
  }
};

// A rank with its messages, and the thread that drives them while the rank does something else.
struct Rank {
  explicit Rank(Group& group) : group(group), messages(group) {
    driver = std::thread([this] {
      while (!stopping) {
        messages.progress();
        std::this_thread::sleep_for(100us);
      }
    });
  }
  ~Rank() {
    EXPECT_TRUE(barrier(group, soon()).ok());  // no rank leaves before all are done
    stopping = true;
    driver.join();
    messages.abort({ErrorCode::kAborted, "the end"});
  }

  std::unique_ptr<RmaWindow> open(Bytes& memory) {
    auto window =
        RmaWindow::open(group, messages, {memory, {int64_t(memory.size())}}, DType::kUInt8, soon());
    EXPECT_TRUE(window.ok()) << window.error().message;
    return window.ok() ? std::move(*window) : nullptr;
  }
  void expectDone(const std::shared_ptr<Message>& message) {
    ASSERT_TRUE(messages.wait(*message, soon()));
    EXPECT_TRUE(message->status().ok()) << message->status().error().message;
  }
  void expectDone(const Result<std::shared_ptr<Message>>& message) {
    ASSERT_TRUE(message.ok()) << message.error().message;
    expectDone(*message);
  }
  int next() const { return (group.rank() + 1) % group.size(); }
  int before() const { return (group.rank() + group.size() - 1) % group.size(); }

  Group& group;
  PointToPoint messages;
  std::atomic<bool> stopping{false};
  std::thread driver;
};

Bytes contents(size_t bytes, int salt) {
  Bytes data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = std::byte((i * 7 + size_t(salt) * 31) % 251);
  return data;
}

void expectOk(const Status& status) { EXPECT_TRUE(status.ok()) << status.error().message; }

const std::vector<size_t> kSizes = {0, 1, 8192, 8193, 100000, 1 << 20, 5};

TEST_P(OneSidedTest, WhoHasASignalHasThePutsBefore) {
  runRanks(ranks(), [](Group& group) {
    Rank rank(group);
    Bytes memory(2 << 20);
    auto window = rank.open(memory);
    for (int round = 0; round < 15; ++round) {
      const size_t bytes = kSizes[size_t(round) % kSizes.size()];
      const Bytes first = contents(bytes, round + group.rank()),
                  second = contents(bytes / 2, round + 50 + group.rank());
      const auto one = window->put(first, rank.next(), 3, soon());
      const auto two = window->put(second, rank.next(), 3 + bytes / 4, soon());
      rank.expectDone(window->signal(rank.next(), soon()));
      rank.expectDone(window->awaitSignal(rank.before(), soon()));
      Bytes expected = contents(bytes, round + rank.before());
      const Bytes over = contents(bytes / 2, round + 50 + rank.before());
      if (!over.empty()) std::memcpy(expected.data() + bytes / 4, over.data(), over.size());
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), memory.begin() + 3)) << round;
      rank.expectDone(one);
      rank.expectDone(two);
      // No rank may put over the compared bytes. That order reaches our driver through memory that
      // is mapped at two addresses, which ThreadSanitizer does not follow. It does see the turn.
      rank.messages.progress();
      expectOk(barrier(group, soon()));
    }
    expectOk(window->close(group, soon()));
  });
}

TEST_P(OneSidedTest, EveryPutIsInItsPlaceOnceClosed) {
  runRanks(ranks(), [](Group& group) {
    Rank rank(group);
    constexpr size_t kPuts = 60, kRoom = 12000;
    const size_t part = kPuts * kRoom;
    Bytes memory(part * size_t(group.size()));
    auto window = rank.open(memory);
    const auto content = [&](int from, int to, size_t put) {
      return contents(put % 3 ? 100 + put : 9000 + put, from * 17 + to * 5 + int(put));
    };
    std::vector<Bytes> kept;  // until they are done
    for (size_t put = 0; put < kPuts; ++put) {
      for (int to = 0; to < group.size(); ++to) {
        kept.push_back(content(group.rank(), to, put));
        const auto message =
            window->put(kept.back(), to, part * size_t(group.rank()) + put * kRoom, soon());
        ASSERT_TRUE(message.ok());
      }
    }
    expectOk(window->close(group, soon()));
    for (int from = 0; from < group.size(); ++from) {
      for (size_t put = 0; put < kPuts; ++put) {
        const Bytes expected = content(from, group.rank(), put);
        EXPECT_EQ(std::memcmp(memory.data() + part * size_t(from) + put * kRoom, expected.data(),
                              expected.size()),
                  0)
            << from << " " << put;
      }
    }
  });
}

TEST_P(OneSidedTest, EachSignalEndsOneWait) {
  runRanks(ranks(), [](Group& group) {
    Rank rank(group);
    Bytes memory(8);
    auto window = rank.open(memory);
    std::vector<std::shared_ptr<Message>> waits;
    for (int n = 0; n < 3; ++n) waits.push_back(window->awaitSignal(rank.before(), soon()));
    for (int n = 0; n < 20; ++n) rank.expectDone(window->signal(rank.next(), soon()));
    for (int n = 3; n < 20; ++n) waits.push_back(window->awaitSignal(rank.before(), soon()));
    for (const auto& wait : waits) rank.expectDone(wait);
    const auto more = window->awaitSignal(rank.before(), Deadline::after(50ms));
    ASSERT_TRUE(rank.messages.wait(*more, soon()));
    EXPECT_EQ(more->status().code(), ErrorCode::kTimeout);
    EXPECT_NE(more->status().error().message.find("wait_signal from rank"), std::string::npos)
        << more->status().error().message;
    rank.expectDone(window->signal(group.rank(), soon()));  // ours
    rank.expectDone(window->awaitSignal(group.rank(), soon()));
    expectOk(window->close(group, soon()));
  });
}

// Messages and windows do not hold each other up, and several windows are independent.
TEST_P(OneSidedTest, BesideMessagesAndOtherWindows) {
  runRanks(ranks(), [](Group& group) {
    Rank rank(group);
    Bytes left(20000), right(20000);
    auto one = rank.open(left), two = rank.open(right);
    const Bytes data = contents(20000, group.rank());
    Bytes received(20000);
    const auto sent = rank.messages.send(data, rank.next(), 7, soon());
    const auto put = one->put(data, rank.next(), 0, soon());
    const auto other = two->put(std::span(data).first(10), rank.next(), 5, soon());
    rank.expectDone(two->signal(rank.next(), soon()));
    rank.expectDone(one->signal(rank.next(), soon()));
    rank.expectDone(one->awaitSignal(rank.before(), soon()));
    rank.expectDone(two->awaitSignal(rank.before(), soon()));
    rank.expectDone(rank.messages.receive(received, rank.before(), 7, soon()));
    EXPECT_EQ(left, contents(20000, rank.before()));
    EXPECT_EQ(right[5], received[0]);
    EXPECT_EQ(received, left);
    rank.expectDone(sent);
    rank.expectDone(put);
    rank.expectDone(other);
    expectOk(one->close(group, soon()));
    expectOk(two->close(group, soon()));
    rank.expectDone(rank.messages.signal(rank.next(), {999}, soon()));  // no rank has this window
  });
}

TEST_P(OneSidedTest, WhatDoesNotFitIsRefusedAtTheSource) {
  runRanks(ranks(), [](Group& group) {
    Rank rank(group);
    Bytes memory(100 + size_t(group.rank()));
    auto window = rank.open(memory);
    const Bytes data(50);
    const size_t there = 100 + size_t(rank.next());
    rank.expectDone(window->put(data, rank.next(), there - 50, soon()));
    for (const uint64_t offset : {uint64_t(there - 49), uint64_t(there + 1), ~uint64_t(0)}) {
      const auto refused = window->put(data, rank.next(), offset, soon());
      ASSERT_FALSE(refused.ok());
      EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
    }
    expectOk(window->close(group, soon()));
    EXPECT_FALSE(window->put(data, rank.next(), 0, soon()).ok());
  });
}

// One rank closes, the others do something else: an error on all ranks, and the window goes on.
TEST_P(OneSidedTest, OtherCallsAreErrorsEverywhere) {
  runRanks(ranks(), [](Group& group) {
    Rank rank(group);
    Bytes memory(100);
    auto window = rank.open(memory);
    const Status status = group.rank() == 0 ? window->close(group, soon()) : barrier(group, soon());
    EXPECT_EQ(status.code(), ErrorCode::kMismatch);
    EXPECT_NE(status.error().message.find("window.tensor_deregister()"), std::string::npos)
        << status.error().message;
    const Bytes data = contents(100, group.rank());
    rank.expectDone(window->put(data, rank.next(), 0, soon()));
    expectOk(window->close(group, soon()));
    EXPECT_EQ(memory, contents(100, rank.before()));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Wires, OneSidedTest,
    testing::Combine(testing::Values(Wire{"inproc", {"inproc"}}, Wire{"shm", {"shm"}},
                                     Wire{"shm_without_cma", {"shm"}, false}, Wire{"tcp", {"tcp"}},
                                     Wire{"sim", {"sim"}}, Wire{"fabric", {"fabric"}}),
                     testing::Values(2, 3)),
    [](const auto& info) {
      return std::string(std::get<0>(info.param).name) + "_" +
             std::to_string(std::get<1>(info.param));
    });

// A peer's requests are checked: a put beyond the window touches nothing.
TEST(OneSided, APutThatLeavesTheWindowIsAProtocolError) {
  std::latch done(2);
  runRanks({.size = 2, .transports = {"shm"}}, [&](Group& group) {
    PointToPoint messages(group);
    Bytes memory(100), data(60);
    auto window = RmaWindow::open(group, messages, {memory, {100}}, DType::kUInt8, soon());
    ASSERT_TRUE(window.ok());
    if (group.rank() == 1) {
      EXPECT_TRUE(messages.wait(*messages.put(data, 0, {1}, 50, soon()), soon()));
    } else {
      const auto waits = (*window)->awaitSignal(1, soon());
      EXPECT_TRUE(messages.wait(*waits, soon()));
      EXPECT_EQ(waits->status().code(), ErrorCode::kProtocol);
      EXPECT_EQ(memory, Bytes(100));
    }
    done.arrive_and_wait();
    messages.abort({ErrorCode::kAborted, "the end"});
  });
}

// The target closes its window alone. Later puts are dropped; their source gets its memory back.
TEST(OneSided, WhatComesForAClosedWindowIsDropped) {
  std::latch closed(2);
  runRanks({.size = 2, .transports = {"tcp"}}, [&](Group& group) {
    Rank rank(group);
    Bytes memory(20000), other(1);
    auto window = rank.open(memory), stays = rank.open(other);
    if (group.rank() == 0) window.reset();
    closed.arrive_and_wait();
    const Bytes data = contents(20000, 1);
    if (group.rank() == 1) {
      rank.expectDone(window->put(data, 0, 0, soon()));
      rank.expectDone(window->put(std::span(data).first(10), 0, 0, soon()));
    }
    expectOk(stays->close(group, soon()));
    if (group.rank() == 0) {
      EXPECT_EQ(memory, Bytes(20000));
    }
  });
}

}  // namespace
}  // namespace mooncake::test
