// Writes to memory of devices that do not order the bytes of cards: a card reports bytes that are
// not there yet, and reads them back before the write ends.
#include "wire_end.h"
#include "wires/sim/sim_transport.h"
#include "wires/tcp/tcp_transport.h"

namespace mooncake::testing {
namespace {

// Which bytes go by cards, how many reads follow the writes, and when bytes land, depends on the pace
// of card and processor. A sanitizer changes it; the data are looked at all the same.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kIsAtPace = false;
#else
constexpr bool kIsAtPace = true;
#endif

constexpr SimOdds kNothing{.failed = 0, .late = 0, .lost = 0, .storm = 0, .death = 0};
constexpr SimOdds kFaults{.failed = 60, .late = 15, .lost = 60, .storm = 50, .death = 200};
constexpr size_t kEach = 32 << 10;

struct Wire {
  SimOdds odds = kNothing;
  bool withdrawalStops = true;
  bool closeEndsReads = true;
  std::shared_ptr<SimCards> cards = nullptr;

  Result<std::unique_ptr<Transport>> operator()(const TransportContext& context) const {
    return createSimTransport(context, TcpTransport::create,
                              {.cards = 2,
                               .odds = odds,
                               .withdrawalStops = withdrawalStops,
                               .closeEndsReads = closeEndsReads,
                               .landsBehind = [](const std::byte*) { return true; },
                               .breakOdds = 0,
                               .made = cards,
                               .channel = {.splitBytes = 500'000}});
  }
};

struct Memory {
  Memory(WireEnd& end, size_t bytes, uint32_t rights) : bytes(bytes) {
    auto added = end.regions().add(this->bytes.data(), bytes, rights | kLasting);
    EXPECT_TRUE(added.ok());
    if (added.ok()) region = std::move(*added);
  }
  Bytes bytes;
  MemoryRegion region;
};

class FabricReadBack : public ConnectedTest {
 protected:
  void open(const Wire& wire, uint32_t rights = kRemoteWrite | kReadBack, size_t bytes = 4 << 20) {
    a.emplace(onLoopback(), wire);
    b.emplace(onLoopback(), Wire{.odds = wire.odds,
                                 .withdrawalStops = wire.withdrawalStops,
                                 .closeEndsReads = wire.closeEndsReads});
    connect(*a, *b);
    here.emplace(*a, bytes, kRemoteRead);
    there.emplace(*b, bytes, rights);
  }
  void TearDown() override {
    ConnectedTest::TearDown();
    there.reset();
    here.reset();
    b.reset();
    a.reset();
  }
  // Writes the range. Returns whether its bytes are there once the write has ended.
  bool arrives(size_t offset, size_t bytes) {
    Completion completion(&bell);
    const std::span source = std::span(here->bytes).subspan(offset, bytes);
    const Status begun = toB->write({there->region.remote(), offset, source, &completion});
    EXPECT_TRUE(begun.ok());
    EXPECT_EQ(endOf(completion), ErrorCode::kOk);
    return std::memcmp(&there->bytes[offset], source.data(), bytes) == 0;
  }
  uint64_t moved() const { return std::static_pointer_cast<FabricChannel>(toB)->moved(); }
  // Writes until cards do so.
  bool isByCards(size_t bytes = kEach) {
    return eventually([&] {
      const uint64_t before = moved();
      arrives(0, bytes);
      return moved() - before == bytes;
    });
  }
  void fill(uint64_t seed) {
    const Bytes data = pattern(here->bytes.size(), seed);
    std::ranges::copy(data, here->bytes.begin());
  }

  std::optional<WireEnd> a, b;
  std::optional<Memory> here, there;
};

TEST_F(FabricReadBack, ByCardsAWriteEndsWithItsBytes) {
  open({});
  ASSERT_TRUE(isByCards(here->bytes.size()));  // all cards have reached the peer's
  const uint64_t before = moved();
  size_t all = 0;
  for (uint64_t i = 0; i < 30; ++i) {
    fill(i);
    const size_t bytes = i % 3 == 0 ? here->bytes.size() : kEach + i * 1000;
    ASSERT_TRUE(arrives(0, bytes)) << i;
    all += bytes;
  }
  if (kIsAtPace) EXPECT_EQ(moved() - before, all);
}

// The memory lands bytes behind their completion, as the other tests assume.
TEST_F(FabricReadBack, WithoutItBytesAreMissing) {
  open({}, kRemoteWrite);
  ASSERT_TRUE(isByCards());
  fill(1);
  const bool areThere = arrives(0, here->bytes.size());
  if (kIsAtPace) EXPECT_FALSE(areThere);
  EXPECT_TRUE(eventually([&] {
    return std::memcmp(there->bytes.data(), here->bytes.data(), there->bytes.size()) == 0;
  }));
}

TEST_F(FabricReadBack, OneReadStandsForManyWrites) {
  const auto cards = std::make_shared<SimCards>();
  open({.cards = cards});
  ASSERT_TRUE(isByCards());
  fill(2);
  const uint64_t writes = here->bytes.size() / kEach;
  const auto carried = [&] { return cards->carried(0) + cards->carried(1); };
  const uint64_t before = carried();
  Completion completion(&bell);
  for (size_t at = 0; at < here->bytes.size(); at += kEach) {
    const std::span source = std::span(here->bytes).subspan(at, kEach);
    ASSERT_TRUE(toB->write({there->region.remote(), at, source, &completion}).ok());
  }
  EXPECT_EQ(endOf(completion), ErrorCode::kOk);
  EXPECT_EQ(there->bytes, here->bytes);
  if (kIsAtPace) EXPECT_LT(carried() - before, writes + writes / 2);
}

// Reads fail, too. Their writes are made once more.
TEST_F(FabricReadBack, CardsThatFailLoseNothing) {
  for (const bool stops : {true, false}) {
    open({.odds = kFaults, .withdrawalStops = stops});
    for (uint64_t i = 0; i < 60; ++i) {
      fill(i);
      ASSERT_TRUE(arrives(i % 7 * kEach, i % 5 == 0 ? 3 << 20 : kEach + i * 1000)) << i;
    }
    EXPECT_GT(moved(), 0u);
    TearDown();
  }
}

// A completion counts several writes; the channel ends while cards write and read back.
TEST_F(FabricReadBack, AnEndAwaitsNoRead) {
  for (const bool isFence : {false, true}) {
    open({});
    ASSERT_TRUE(isByCards());
    Completion completion(&bell);
    for (size_t at = 0; at < here->bytes.size(); at += kEach) {
      const std::span source = std::span(here->bytes).subspan(at, kEach);
      ASSERT_TRUE(toB->write({there->region.remote(), at, source, &completion}).ok());
    }
    isFence ? toB->fence() : toB->close();
    EXPECT_TRUE(completion.finished());
    TearDown();
  }
}

// Reads of such cards may crash the process, so no card writes to the memory.
TEST_F(FabricReadBack, CardsThatCannotReadDoNotWrite) {
  ::testing::internal::CaptureStderr();
  open({.closeEndsReads = false});
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(arrives(0, kEach));
  EXPECT_EQ(moved(), 0u);
  const std::string logged = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(logged.find(", provider sim: kernels may miss bytes"), std::string::npos) << logged;
}

}  // namespace
}  // namespace mooncake::testing
