// All channels of an engine share its cards. A channel with operations that never end leaves room.
#include "wires/cards/rails.h"

#include <deque>

#include "engine_side.h"
#include "wires/nic/null/null_nic.h"

namespace mooncake::testing {
namespace {

constexpr size_t kDepth = 32;
constexpr NicPeer kSilent = 1, kRefused = 2, kHealthy = 3;

// A card that ends operations at once, except to two peers: to one peer operations never end, and
// to the other one none begins.
class PartlyStuckNic final : public Nic {
 public:
  PartlyStuckNic() : below_(kDepth) {}

  const std::string& name() const override { return below_.name(); }
  const char* provider() const override { return "stuck"; }
  const NicLimits& limits() const override { return below_.limits(); }
  Bytes address() const override { return below_.address(); }
  Result<NicPeer> insert(ByteView address) override { return below_.insert(address); }
  void remove(NicPeer) override {}
  Result<std::unique_ptr<NicMemory>> registerMemory(std::span<std::byte> memory,
                                                    uint32_t access) override {
    return below_.registerMemory(memory, access);
  }
  Status send(NicPeer peer, NicBuffer header, NicBuffer body, void* context) override {
    if (peer == kRefused) return {ErrorCode::kExhausted, "that peer takes nothing"};
    if (peer == kHealthy) return below_.send(peer, header, body, context);
    std::lock_guard lock(mutex_);
    stuck_.push_back(context);
    return {};
  }
  Status receive(NicBuffer, void*) override { return {}; }
  Status read(NicPeer, NicBuffer, NicKey, uint64_t, void*) override {
    return {ErrorCode::kUnsupported, "no reads"};
  }
  Status write(NicPeer, NicBuffer, NicKey, uint64_t, void*) override {
    return {ErrorCode::kUnsupported, "no writes"};
  }
  size_t poll(std::span<NicCompletion> into) override {
    const size_t count = below_.poll(into);
    std::lock_guard lock(mutex_);
    if (!isClosed_ || count > 0 || stuck_.empty()) return count;
    into[0] = {.error = NicError::kCancelled, .context = stuck_.back()};
    stuck_.pop_back();
    return 1;
  }
  void wait(Deadline deadline) override { below_.wait(deadline); }
  void wake() override { below_.wake(); }
  void close() override {
    std::lock_guard lock(mutex_);
    isClosed_ = true;
  }

 private:
  NullNic below_;
  std::mutex mutex_;  // guards all below
  std::vector<void*> stuck_;
  bool isClosed_ = false;
};

struct Counts {
  std::atomic<size_t> begun{0}, ended{0}, failed{0};
};

class Sending final : public RailOperation {
 public:
  Sending(NicPeer to, RailShare& share, Counts& counts) : to_(to), share_(share), counts_(counts) {}
  Status begin(Nic& nic) override {
    const Status begun = nic.send(to_, {}, {}, this);
    if (begun.ok()) ++counts_.begun;
    return begun;
  }
  void end(const NicCompletion& how) override {
    ++(how.error == NicError::kNone ? counts_.ended : counts_.failed);
  }
  RailShare& share() const override { return share_; }

 private:
  const NicPeer to_;
  RailShare& share_;
  Counts& counts_;
};

class RailsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::vector<std::unique_ptr<Nic>> nics;
    nics.push_back(std::make_unique<PartlyStuckNic>());
    auto made = Rails::create(std::move(nics), {});
    ASSERT_TRUE(made.ok());
    rails = std::move(*made);
    for (size_t i = 0; i < 1 + kSilentOnes; ++i) shares.emplace_back(*rails);
  }
  void TearDown() override {
    rails->stop();
    shares.clear();
  }
  // Sends `count` operations of one channel to the peer.
  void send(size_t count, NicPeer to, RailShare& share, Counts& counts) {
    for (size_t i = 0; i < count; ++i)
      rails->submit(0, std::make_unique<Sending>(to, share, counts));
  }

  static constexpr size_t kMany = 4 * kDepth;
  static constexpr size_t kSilentOnes = 6;
  Counts silent, healthy;
  std::shared_ptr<Rails> rails;
  std::deque<RailShare> shares;  // the first one is the healthy channel's
};

TEST_F(RailsTest, ChannelsWhoseOperationsDoNotEndLeaveRoom) {
  for (size_t i = 1; i <= kSilentOnes; ++i) send(kMany, kSilent, shares[i], silent);
  send(kMany, kHealthy, shares[0], healthy);
  EXPECT_TRUE(eventually([&] { return healthy.ended == kMany; })) << healthy.ended;
  EXPECT_LT(silent.begun, kDepth);
  EXPECT_EQ(silent.ended, 0u);
}

TEST_F(RailsTest, OneThatTheCardDoesNotTakeHoldsUpNoOtherChannel) {
  send(1, kRefused, shares[1], silent);
  send(kMany, kHealthy, shares[0], healthy);
  EXPECT_TRUE(eventually([&] { return healthy.ended == kMany; })) << healthy.ended;
  EXPECT_EQ(silent.begun, 0u);
}

TEST_F(RailsTest, StopEndsAll) {
  send(kMany, kSilent, shares[1], silent);
  send(3, kRefused, shares[2], silent);
  rails->stop();
  EXPECT_EQ(silent.failed, kMany + 3);
}

}  // namespace
}  // namespace mooncake::testing
