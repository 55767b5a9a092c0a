#include "transfer/transfer_engine.h"

#include <atomic>
#include <functional>
#include <future>
#include <gtest/gtest.h>
#include <string_view>
#include <thread>
#include <vector>

#include "base/failpoint.h"
#include "engine_side.h"

// The transfer engine without Python: two of them in this process, over TCP.
namespace mooncake::transfer {
namespace {

using mooncake::testing::pattern;

std::shared_ptr<TransferEngine> makeEngine(const char* transport = "tcp") {
  TransferEngineOptions options{.localName = "127.0.0.1", .metadataServer = "P2PHANDSHAKE"};
  options.env.transports = {transport};
  auto made = TransferEngine::open(std::move(options));
  EXPECT_TRUE(made.ok()) << made.error().message;
  return made.ok() ? *made : nullptr;
}

uint64_t addressOf(const Bytes& bytes) { return reinterpret_cast<uint64_t>(bytes.data()); }

// Each call waits at a bell of its own, which is rung when the caller may have gone on already.
TEST(TransferEngineThreads, ManyCallersAtOnce) {
  constexpr size_t kThreads = 4, kRounds = 100, kBytes = 100'000;
  const auto here = makeEngine(), there = makeEngine();
  Bytes target(kThreads * kBytes), source = pattern(kThreads * kBytes, 1);
  ASSERT_EQ(there->registerMemory(addressOf(target), target.size()), kGood);
  ASSERT_EQ(here->registerMemory(addressOf(source), source.size()), kGood);
  const auto segment = here->openSegment(there->session());
  ASSERT_NE(segment, nullptr);
  std::vector<std::future<void>> callers;
  for (size_t i = 0; i < kThreads; ++i) {
    callers.push_back(std::async(std::launch::async, [&, at = i * kBytes] {
      for (size_t round = 0; round < kRounds; ++round) {
        const TransferRequest requests[] = {
            {Opcode::kWrite, addressOf(source) + at, segment, addressOf(target) + at, kBytes}};
        ASSERT_EQ(here->transfer(requests), kGood);
      }
    }));
  }
  for (auto& caller : callers) caller.wait();
  EXPECT_TRUE(target == source);
  EXPECT_EQ(here->counters().bytesWritten, kThreads * kRounds * kBytes);
}

// ---- who was shut out in the middle of a write

std::atomic<bool> holdsWrites{false};
std::atomic<bool> isHeld{false};

// A piece of a write that its process was stopped in.
void holdWrite(const char* name) {
  if (std::string_view(name) != "write-piece") return;
  while (holdsWrites) {
    isHeld = true;
    std::this_thread::yield();
  }
}

bool comesTrue(const std::function<bool()>& condition) {
  const auto deadline = Deadline::after(std::chrono::seconds(20));
  while (!condition()) {
    if (deadline.passed()) return false;
    std::this_thread::yield();
  }
  return true;
}

enum class Way { kFenced, kForgotten };

class LateWrite : public ::testing::TestWithParam<Way> {};

TEST_P(LateWrite, ManagedMemoryIsNotGivenAwayBeforeItsEnd) {
  constexpr uint64_t kBytes = ManagedPool::kLeastBytes;
  const auto writer = makeEngine("inproc"), owner = makeEngine("inproc");
  const uint64_t memory = owner->allocateManaged(kBytes);
  ASSERT_NE(memory, 0u);
  Bytes source = pattern(kBytes, 1);
  ASSERT_EQ(writer->registerMemory(addressOf(source), source.size()), kGood);
  const auto segment = writer->openSegment(owner->session());
  ASSERT_NE(segment, nullptr);
  holdsWrites = true;
  observeFailpoints(&holdWrite);
  auto written = std::async(std::launch::async, [&] {
    const TransferRequest requests[] = {
        {Opcode::kWrite, addressOf(source), segment, memory, kBytes}};
    return writer->transfer(requests);
  });
  EXPECT_TRUE(comesTrue([] { return isHeld.load(); }));

  const auto back = owner->openSegment(writer->session());
  ASSERT_NE(back, nullptr);
  const auto peer = back->peer(Deadline::after(std::chrono::seconds(5)));
  ASSERT_TRUE(peer.ok());
  EXPECT_TRUE(owner->engine().lateWriters().empty());  // nobody has shut it out
  if (GetParam() == Way::kFenced) {
    (*peer)->channel->fence();
  } else {
    ASSERT_TRUE(owner->engine().forget(*peer, Deadline::after(std::chrono::seconds(5))).ok());
  }
  EXPECT_EQ(owner->freeManaged(memory, kBytes), kGood);
  for (int i = 0; i < 100; ++i) EXPECT_NE(owner->allocateManaged(kBytes), memory);

  holdsWrites = false;
  written.wait();
  EXPECT_TRUE(comesTrue([&] { return owner->engine().lateWriters().empty(); }));
  EXPECT_EQ(owner->allocateManaged(kBytes), memory);
  isHeld = false;
}

INSTANTIATE_TEST_SUITE_P(TransferEngine, LateWrite,
                         ::testing::Values(Way::kFenced, Way::kForgotten), [](const auto& way) {
                           return way.param == Way::kFenced ? "fenced" : "forgotten";
                         });

}  // namespace
}  // namespace mooncake::transfer
