// Mooncake's tests for EFA, by the same names: a transfer engine over network cards. Here four
// cards of libfabric's provider over TCP stand in for them.
#include <cstring>
#include <future>
#include <gtest/gtest.h>
#include <random>

#include "engine_side.h"
#include "loopback_cards.h"
#include "transfer/transfer_engine.h"
#include "wires/nic/libfabric/cards.h"

namespace mooncake::transfer {
namespace {

using mooncake::test::LoopbackCards;
using mooncake::testing::pattern;

constexpr const char* kCards = "127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4";

uint64_t addressOf(const Bytes& bytes) { return reinterpret_cast<uint64_t>(bytes.data()); }

Result<std::shared_ptr<TransferEngine>> openEngine(const std::string& protocol,
                                                   const std::string& devices) {
  TransferEngineOptions options{.localName = "127.0.0.1",
                                .metadataServer = "P2PHANDSHAKE",
                                .protocol = protocol,
                                .devices = devices};
  options.env.transports = {"fabric"};
  return TransferEngine::open(std::move(options));
}

// Two engines, each with memory that is registered.
class EFATransportTest : public ::testing::Test {
 protected:
  void SetUp() override {
    FabricEnv env;
    env.requiredProvider = "tcp;ofi_rxm";
    if (const auto cards = listLibfabricCards(env); !cards.ok())
      GTEST_SKIP() << cards.error().message;
    auto here = openEngine("fabric", kCards), there = openEngine("fabric", kCards);
    ASSERT_TRUE(here.ok()) << here.error().message;
    ASSERT_TRUE(there.ok()) << there.error().message;
    here_ = *here;
    there_ = *there;
  }
  // Makes memory on both sides: ours holds a pattern, theirs zeros.
  void give(size_t bytes) {
    source_ = pattern(bytes, 1);
    target_.assign(bytes, std::byte{0});
    ASSERT_EQ(here_->registerMemory(addressOf(source_), bytes), kGood);
    ASSERT_EQ(there_->registerMemory(addressOf(target_), bytes), kGood);
    segment_ = here_->openSegment(there_->session());
    ASSERT_NE(segment_, nullptr);
    ASSERT_EQ(here_->transportTo(there_->session()), "fabric");
  }
  TransferRequest request(Opcode opcode, size_t at, size_t bytes) const {
    return {opcode, addressOf(source_) + at, segment_, addressOf(target_) + at, bytes};
  }
  // `count` pieces that follow each other from `at` on.
  std::vector<TransferRequest> requests(Opcode opcode, size_t count, size_t each,
                                        size_t at = 0) const {
    std::vector<TransferRequest> found;
    for (size_t i = 0; i < count; ++i) found.push_back(request(opcode, at + i * each, each));
    return found;
  }
  Code submitAndAwait(std::span<const TransferRequest> requests) {
    const auto batch = here_->allocateBatch(requests.size());
    if (!batch) return kMemory;
    const Code begun = here_->submit(batch, requests);
    const Code ended = begun == kGood ? here_->await(*batch) : begun;
    const Code released = here_->release(batch->id);
    return ended == kGood ? released : ended;
  }

  LoopbackCards cards_{{"fabric"}};
  std::shared_ptr<TransferEngine> here_, there_;
  Bytes source_, target_;
  std::shared_ptr<Segment> segment_;
};

TEST_F(EFATransportTest, InstallTransport) {
  EXPECT_EQ(here_->protocol(), "fabric");
  const auto none = openEngine("fabric", "eth77");
  ASSERT_FALSE(none.ok());
  EXPECT_NE(none.error().message.find("eth77"), std::string::npos) << none.error().message;
}

TEST_F(EFATransportTest, LoopbackWrite) {
  give(1 << 20);
  Bytes own(1 << 20);
  ASSERT_EQ(here_->registerMemory(addressOf(own), own.size()), kGood);
  const auto ours = here_->openSegment(here_->session());
  ASSERT_NE(ours, nullptr);
  const TransferRequest requests[] = {
      {Opcode::kWrite, addressOf(source_), ours, addressOf(own), own.size()}};
  ASSERT_EQ(submitAndAwait(requests), kGood);
  EXPECT_TRUE(own == source_);
}

TEST_F(EFATransportTest, WriteAndRead) {
  give(3'000'001);
  ASSERT_EQ(submitAndAwait(requests(Opcode::kWrite, 1, source_.size())), kGood);
  EXPECT_TRUE(target_ == source_);
  std::fill(source_.begin(), source_.end(), std::byte{0});
  ASSERT_EQ(submitAndAwait(requests(Opcode::kRead, 1, source_.size())), kGood);
  EXPECT_TRUE(source_ == pattern(source_.size(), 1));
}

TEST_F(EFATransportTest, MultiWrite) {
  constexpr size_t kCount = 16, kEach = 65'536;
  give(kCount * kEach);
  ASSERT_EQ(submitAndAwait(requests(Opcode::kWrite, kCount, kEach)), kGood);
  EXPECT_TRUE(target_ == source_);
}

TEST_F(EFATransportTest, StressMultipleBatches) {
  constexpr size_t kBatches = 20, kCount = 8, kEach = 40'000;
  give(kBatches * kCount * kEach);
  std::vector<std::shared_ptr<Batch>> batches;
  for (size_t i = 0; i < kBatches; ++i) {
    batches.push_back(here_->allocateBatch(kCount));
    ASSERT_NE(batches.back(), nullptr);
    ASSERT_EQ(
        here_->submit(batches.back(), requests(Opcode::kWrite, kCount, kEach, i * kCount * kEach)),
        kGood);
  }
  for (const auto& batch : batches) {
    EXPECT_EQ(here_->await(*batch), kGood);
    EXPECT_EQ(here_->release(batch->id), kGood);
  }
  EXPECT_TRUE(target_ == source_);
}

TEST_F(EFATransportTest, WarmupSegmentLoopback) {
  EXPECT_EQ(here_->warmUp(there_->session()), kGood);
  EXPECT_EQ(here_->counters().active, 1u);
  EXPECT_EQ(here_->warmUp(there_->session()), kGood);
  EXPECT_EQ(here_->counters().opened, 1u);
  EXPECT_EQ(here_->warmUp(here_->session()), kGood);
}

TEST_F(EFATransportTest, WarmupSegmentNotFound) {
  EXPECT_NE(here_->warmUp("127.0.0.1:9"), kGood);
  EXPECT_EQ(here_->warmUp(there_->session()), kGood);
}

TEST_F(EFATransportTest, RegisterMemoryBatch) {
  constexpr size_t kCount = 8, kEach = 100'000;
  source_ = pattern(kCount * kEach, 1);
  target_.assign(source_.size(), std::byte{0});
  std::vector<TransferEngine::Range> ours, theirs;
  std::vector<uint64_t> addresses;
  for (size_t i = 0; i < kCount; ++i) {
    ours.push_back({addressOf(source_) + i * kEach, kEach});
    theirs.push_back({addressOf(target_) + i * kEach, kEach});
    addresses.push_back(theirs.back().address);
  }
  ASSERT_EQ(here_->registerMemory(ours, "cpu:0"), kGood);
  ASSERT_EQ(there_->registerMemory(theirs, "cpu:0"), kGood);
  segment_ = here_->openSegment(there_->session());
  ASSERT_NE(segment_, nullptr);
  ASSERT_EQ(submitAndAwait(requests(Opcode::kWrite, kCount, kEach)), kGood);
  EXPECT_TRUE(target_ == source_);
  ASSERT_EQ(there_->unregisterMemory(addresses), kGood);
  EXPECT_NE(submitAndAwait(requests(Opcode::kWrite, 1, kEach)), kGood);
}

TEST_F(EFATransportTest, LargeTransfer) {
  constexpr size_t kCount = 64, kEach = 1 << 20;
  give(2 * kCount * kEach);
  ASSERT_EQ(submitAndAwait(requests(Opcode::kWrite, kCount, kEach)), kGood);
  EXPECT_EQ(std::memcmp(target_.data(), source_.data(), kCount * kEach), 0);
  EXPECT_EQ(target_[kCount * kEach], std::byte{0}) << "behind the last one";
}

TEST_F(EFATransportTest, RepeatedOpenSegment) {
  constexpr size_t kEach = 10'000, kTimes = 20;
  give(kTimes * kEach);
  for (size_t i = 0; i < kTimes; ++i) {
    segment_ = here_->openSegment(there_->session());
    ASSERT_NE(segment_, nullptr);
    ASSERT_EQ(submitAndAwait(requests(Opcode::kWrite, 1, kEach, i * kEach)), kGood);
  }
  EXPECT_TRUE(target_ == source_);
  EXPECT_EQ(here_->counters().opened, 1u);
}

// "Cannot select device": Mooncake's first version failed at some sizes of blocks with many
// threads, if a block crossed the border between two registrations.
TEST_F(EFATransportTest, EveryBlockSizeAndThreadCountFindsACard) {
  constexpr size_t kLeast = 4 << 10, kMost = 64 << 20;
  give(kMost + 4096);
  std::mt19937_64 random(7);
  const auto below = [&](uint64_t end) { return random() % end; };
  for (size_t draw = 0; draw < 16; ++draw) {
    // Small and large blocks are equally frequent; the first two are the smallest and the largest.
    const size_t bound = kLeast << below(15);
    const size_t each = draw < 2 ? (draw == 0 ? kLeast : kMost)
                                 : std::clamp<size_t>(bound / 2 + below(bound), kLeast, kMost);
    const size_t threads = std::min<size_t>(1 + below(48), kMost / each);
    const size_t batch = std::min<size_t>(1 + below(32), kMost / each / threads);
    const size_t first = below(4096);
    SCOPED_TRACE(std::to_string(threads) + " threads, batches of " + std::to_string(batch) +
                 " blocks of " + std::to_string(each));
    std::fill(target_.begin(), target_.end(), std::byte{0});
    std::vector<std::future<Code>> callers;
    for (size_t i = 0; i < threads; ++i) {
      callers.push_back(std::async(std::launch::async, [&, i] {
        return submitAndAwait(requests(Opcode::kWrite, batch, each, first + i * batch * each));
      }));
    }
    for (auto& caller : callers) EXPECT_EQ(caller.get(), kGood);
    EXPECT_EQ(std::memcmp(target_.data() + first, source_.data() + first, threads * batch * each),
              0);
  }
}

}  // namespace
}  // namespace mooncake::transfer
