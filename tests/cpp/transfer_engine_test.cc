#include "transfer/transfer_engine.h"

#include <future>
#include <gtest/gtest.h>
#include <vector>

#include "engine_side.h"

// The transfer engine without Python: two of them in this process, over TCP.
namespace mooncake::transfer {
namespace {

using mooncake::testing::pattern;

std::shared_ptr<TransferEngine> makeEngine() {
  TransferEngineOptions options{.localName = "127.0.0.1", .metadataServer = "P2PHANDSHAKE"};
  options.env.transports = {"tcp"};
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

}  // namespace
}  // namespace mooncake::transfer
