// Keys with which cards write: only a peer that is asked to write gets them, though all know the
// job's key.
#include "wire_end.h"
#include "wires/sim/sim_transport.h"
#include "wires/tcp/tcp_transport.h"

namespace mooncake::testing {
namespace {

using control::Kind;

constexpr size_t kBytes = 64 << 10;
constexpr SimOdds kNothing{.failed = 0, .late = 0, .lost = 0, .storm = 0, .death = 0};

auto wireOf(bool closeEndsReads) {
  return [=](const TransportContext& context) {
    return createSimTransport(
        context, TcpTransport::create,
        {.cards = 1, .odds = kNothing, .closeEndsReads = closeEndsReads, .breakOdds = 0});
  };
}

// A peer that sends its own messages to a channel of cards, and has a card of its own.
class Stranger {
 public:
  explicit Stranger(WireEnd& owner) : owner_(owner) {
    auto connected = connectNow(*end_.transport, owner.id(), owner.transport->endpoint(),
                                Deadline::after(kPatience));
    EXPECT_TRUE(connected.ok());
    if (!connected.ok()) return;
    channel_ = std::move(*connected);
    const auto hello = control::Hello::decode(await(Kind::kHello));
    EXPECT_TRUE(hello.ok());
    if (!hello.ok()) return;
    auto peer = card_.insert(hello->rails.at(0).address);
    EXPECT_TRUE(peer.ok());
    if (peer.ok()) peer_ = *peer;
  }
  ~Stranger() {
    if (channel_) channel_->close();
  }

  control::Grant ask(uint64_t key) {
    EXPECT_TRUE(channel_->send(control::encodeNumber(Kind::kResolve, key)).ok());
    auto grant = control::Grant::decode(await(Kind::kGrant));
    EXPECT_TRUE(grant.ok());
    return grant.ok() ? std::move(*grant) : control::Grant();
  }
  // Writes by the card, to the beginning of the memory under that key.
  NicError write(const NicKey& key) {
    Bytes data(4096, std::byte{9});
    EXPECT_TRUE(card_.write(peer_, {data, nullptr}, key, 0, nullptr).ok());
    std::array<NicCompletion, 1> completions;
    const auto polls = [&] { return card_.poll(completions) > 0; };
    const uint64_t before = card_.carried();
    EXPECT_TRUE(eventually([&] { return polls() || card_.carried() > before; }));
    card_.arrive(owner_.id(), await(Kind::kCarried));
    EXPECT_TRUE(eventually(polls));
    return completions[0].error;
  }

 private:
  // The fields of the next message of that kind.
  Bytes await(Kind kind) {
    for (;;) {
      const auto messages = end_.messagesFrom(owner_.id(), ++seen_);
      EXPECT_EQ(messages.size(), seen_);
      if (messages.size() != seen_) return {};
      const Bytes& last = messages.back();
      if (static_cast<Kind>(last[0]) == kind) return Bytes(last.begin() + 1, last.end());
    }
  }

  WireEnd& owner_;
  WireEnd end_{onLoopback(), TcpTransport::create};
  std::shared_ptr<Channel> channel_;
  SimNic card_{{.host = end_.id(), .odds = kNothing, .carry = [this](const auto&, ByteView bytes) {
                  return channel_->send(control::withKind(Kind::kCarried, bytes));
                }}};
  NicPeer peer_ = 0;
  size_t seen_ = 0;
};

struct Memory {
  Memory(WireEnd& end, uint32_t rights) : bytes(kBytes) {
    auto added = end.regions().add(bytes.data(), bytes.size(), rights | kLasting);
    EXPECT_TRUE(added.ok());
    if (added.ok()) region = std::move(*added);
  }
  Bytes bytes;
  MemoryRegion region;
};

class FabricLandingKeys : public ::testing::TestWithParam<bool> {};

TEST_P(FabricLandingKeys, AreNotForAPeerThatIsNotAsked) {
  WireEnd owner(onLoopback(), wireOf(GetParam()));
  Memory landing(owner, kLanding), readable(owner, kRemoteRead | kLanding),
      writable(owner, kRemoteRead | kRemoteWrite);
  Stranger stranger(owner);
  if (HasFailure()) return;
  for (const Memory* memory : {&landing, &readable}) {
    const auto grant = stranger.ask(memory->region.remote().key);
    EXPECT_EQ(grant.rights & (kLanding | kRemoteWrite), 0u);
    for (const auto& pieces : grant.cards) {
      for (const auto& piece : pieces) EXPECT_EQ(stranger.write(piece.key), NicError::kRefused);
    }
    EXPECT_EQ(memory->bytes, Bytes(kBytes));
  }
  // The same for memory that every rank of the job may write.
  const auto grant = stranger.ask(writable.region.remote().key);
  ASSERT_EQ(grant.cards.size(), 1u);
  ASSERT_EQ(grant.cards[0].size(), 1u);
  EXPECT_EQ(stranger.write(grant.cards[0][0].key), NicError::kNone);
  EXPECT_EQ(writable.bytes[0], std::byte{9});
}

INSTANTIATE_TEST_SUITE_P(Cards, FabricLandingKeys, ::testing::Bool());

}  // namespace
}  // namespace mooncake::testing
