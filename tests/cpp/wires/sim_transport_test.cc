// The simulated wire keeps the contract of all wires, and has the faults that it promises.
#include "wires/sim/sim_transport.h"

#include <atomic>
#include <set>

#include "engine/engine.h"
#include "transport_suite.h"
#include "wires/tcp/tcp_transport.h"

namespace mooncake::testing {
namespace {

struct Sim {
  // These tests do not connect again.
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context) {
    return createSimTransport(context, TcpTransport::create, {.breakOdds = 0});
  }
  static EngineEnv env() { return onLoopback(); }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Sim, TransportSuite, Sim);

struct SimOtherSeed : Sim {
  static EngineEnv env() {
    EngineEnv env = Sim::env();
    env.simSeed = 20261121;
    return env;
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(SimOtherSeed, TransportSuite, SimOtherSeed);

// ---- the dice

TEST(SimDiceTest, TheSameSeedDecidesTheSame) {
  SimDice one(7), same(7), other(8);
  bool differs = false;
  for (uint64_t i = 0; i < 1000; ++i) {
    const auto delay = one.delay();
    EXPECT_EQ(delay, same.delay());
    EXPECT_LE(delay, SimDice::kMostDelay);
    differs = differs || delay != other.delay();
    const bool happens = one.once(3);
    EXPECT_EQ(happens, same.once(3));
    differs = differs || happens != other.once(3);
  }
  EXPECT_TRUE(differs);
}

// ---- the wire

// Reads a byte that another thread may be writing, without ThreadSanitizer's check.
__attribute__((no_sanitize("thread"))) std::byte peekAt(const std::byte& byte) {
  return *static_cast<const volatile std::byte*>(&byte);
}

// Two connected ends. `breakOdds` applies at the end of a.
class SimWire : public ConnectedTest {
 protected:
  void connect(uint32_t breakOdds) { connect({.breakOdds = breakOdds}); }
  void connect(SimOptions options) {
    const auto create = [&](const std::shared_ptr<SimCards>& cards) {
      return [&options, cards](const TransportContext& context) {
        options.made = cards;
        return createSimTransport(context, TcpTransport::create, options);
      };
    };
    cardsOfA = std::make_shared<SimCards>();
    cardsOfB = std::make_shared<SimCards>();
    a = std::make_unique<WireEnd>(Sim::env(), create(cardsOfA));
    b = std::make_unique<WireEnd>(Sim::env(), create(cardsOfB));
    ConnectedTest::connect(*a, *b);
  }
  Status reconnect(std::chrono::milliseconds patience = kPatience) {
    return ConnectedTest::reconnect(*a, *b, patience);
  }
  // Runs puts and gets that must end well, as long as `goesOn`.
  template <typename GoesOn>
  void transferWhile(const Part& part, GoesOn&& goesOn) {
    const Bytes data = pattern(kBytes, 3);
    std::copy(data.begin(), data.end(), part.bytes().begin() + 4096);
    Bytes target(kBytes);
    const auto wait = Deadline::after(kPatience);
    do {
      ASSERT_FALSE(wait.passed());
      ++stamp_;
      ASSERT_TRUE(
          toB->put({part.remote(), 128, pattern(3000, stamp_), {64, stampOf(stamp_)}}).ok());
      std::fill(target.begin(), target.end(), std::byte{});
      Completion completion(&bell);
      ASSERT_TRUE(toB->get({part.remote(), 4096, target, &completion}).ok());
      ASSERT_EQ(endOf(completion), ErrorCode::kOk);
      ASSERT_EQ(target, data);
      ASSERT_TRUE(eventually([&] { return part.word(64).load() == stampOf(stamp_); }));
      ASSERT_TRUE(part.holds(128, pattern(3000, stamp_)));
    } while (goesOn());
  }
  static constexpr size_t kBytes = 300'000;
  static constexpr SimOdds kNothingElse{.failed = 0, .late = 0, .lost = 0, .storm = 0, .death = 0};

  std::shared_ptr<SimCards> cardsOfA, cardsOfB;
  uint64_t stamp_ = 0;

  std::unique_ptr<WireEnd> a, b;
};

TEST_F(SimWire, PutsOvertakeEachOther) {
  connect(0);
  constexpr size_t kPuts = 200;
  auto part = b->part(4096 + kPuts * 8);
  bool hasOvertaken = false;
  for (uint64_t round = 1; round <= 100 && !hasOvertaken; ++round) {
    const auto isThere = [&](size_t i) { return part.word(64 + 8 * i).load() == stampOf(round); };
    for (size_t i = 0; i < kPuts; ++i)
      ASSERT_TRUE(toB->put({part.remote(), 4096, {}, {64 + 8 * i, stampOf(round)}}).ok());
    const auto wait = Deadline::after(kPatience);
    while (!isThere(kPuts - 1) && !wait.passed()) std::this_thread::yield();
    for (size_t i = 0; i < kPuts; ++i) hasOvertaken = hasOvertaken || !isThere(i);
    for (size_t i = 0; i < kPuts; ++i) ASSERT_TRUE(eventually([&] { return isThere(i); }));
  }
  EXPECT_TRUE(hasOvertaken);
}

// A slot may be put again while its last put is under way.
TEST_F(SimWire, PutsWithOneWordKeepTheirOrder) {
  connect(0);
  constexpr size_t kBytes = 100'000;
  auto part = b->part(kBytes + 4096);
  for (uint64_t number = 1; number <= 300; ++number) {
    ASSERT_TRUE(
        toB->put({part.remote(), 4096, pattern(kBytes, number), {64, stampOf(number)}}).ok());
    if (number % 3 > 0) continue;
    ASSERT_TRUE(eventually([&] { return part.word(64).load() == stampOf(number); }));
    ASSERT_TRUE(part.holds(4096, pattern(kBytes, number))) << number;
  }
}

// Data arrives before its stamp, possibly with holes. The stamp never comes first.
TEST_F(SimWire, PiecesOfAPutComeInAnyOrderAndTheStampLast) {
  connect(0);
  constexpr size_t kBytes = 300'000;
  auto part = b->part(kBytes + 4096);
  const Bytes data(kBytes, std::byte{1});
  bool hasSeenHole = false;
  for (uint64_t round = 1; round <= 100 && !hasSeenHole; ++round) {
    std::fill(part.bytes().begin() + 4096, part.bytes().end(), std::byte{});
    ASSERT_TRUE(toB->put({part.remote(), 4096, data, {64, stampOf(round)}}).ok());
    const auto at = [&](size_t offset) {
      return peekAt(part.bytes()[4096 + offset]) != std::byte{};
    };
    const auto wait = Deadline::after(kPatience);
    while (part.word(64).load() != stampOf(round) && !wait.passed()) {
      bool isMissing = false;
      for (size_t i = 0; i < kBytes; i += 1000) {
        hasSeenHole = hasSeenHole || (isMissing && at(i));
        isMissing = isMissing || !at(i);
      }
    }
    EXPECT_TRUE(part.holds(4096, data));
  }
  EXPECT_TRUE(hasSeenHole);
}

TEST_F(SimWire, WhatWasPutBeforeCloseArrives) {
  for (uint64_t round = 1; round <= 20; ++round) {
    connect(0);
    auto part = b->part(1 << 16);
    for (uint64_t i = 0; i < 20; ++i) {
      ASSERT_TRUE(
          toB->put({part.remote(), 4096 + i * 2000, pattern(2000, i), {64 + 8 * i, 1}}).ok());
    }
    toB->close();
    EXPECT_TRUE(b->endOf(a->id()).ok());
    for (uint64_t i = 0; i < 20; ++i) {
      EXPECT_EQ(part.word(64 + 8 * i).load(), 1u);
      EXPECT_TRUE(part.holds(4096 + i * 2000, pattern(2000, i)));
    }
    toA->close();
  }
}

// Data is lost at one end of a connection, and the other end does not notice.
TEST_F(SimWire, BreaksAndIsMadeAgain) {
  connect(20);
  constexpr size_t kBytes = 100'000;
  auto part = b->part(kBytes + 4096);
  const Bytes data = pattern(kBytes, 1);
  std::copy(data.begin(), data.end(), part.bytes().begin() + 4096);
  uint64_t stamp = 0;
  size_t halfPuts = 0, lostGets = 0, lostCompletions = 0;
  // Runs until all kinds were seen.
  const auto isEnough = [&] { return lostGets > 0 && halfPuts + lostCompletions > 0; };
  for (size_t round = 1; round <= 20 || (!isEnough() && round <= 200); ++round) {
    uint64_t before = stamp;
    Bytes target(kBytes);
    while (
        toB->put({part.remote(), 128, pattern(1000, stamp + 1), {64, stampOf(stamp + 1)}}).ok()) {
      ++stamp;
      std::fill(target.begin(), target.end(), std::byte{});
      Completion completion(&bell);
      if (!toB->get({part.remote(), 4096, target, &completion}).ok()) break;
      const ErrorCode end = endOf(completion);
      if (end == ErrorCode::kOk) {
        EXPECT_EQ(target, data);
      } else {
        EXPECT_EQ(end, ErrorCode::kPeerLost);
        ++lostGets;
        lostCompletions += target == data;
      }
    }
    EXPECT_GT(stamp, before);
    // Puts are refused until the connection is made again.
    Completion refused(&bell);
    EXPECT_EQ(toB->put({part.remote(), 128, {}, {64, stampOf(stamp + 1)}}).code(),
              ErrorCode::kPeerLost);
    EXPECT_EQ(toB->get({part.remote(), 4096, target, &refused}).code(), ErrorCode::kPeerLost);
    EXPECT_EQ(toB->send(Bytes(1)).code(), ErrorCode::kPeerLost);
    EXPECT_TRUE(refused.finished());
    ASSERT_TRUE(eventually([&] { return a->endedCount() == round; }));
    // The peer can still speak.
    ASSERT_TRUE(toA->send(pattern(10, round)).ok());
    ASSERT_EQ(a->messagesFrom(b->id(), round).size(), round);
    EXPECT_FALSE(a->endOf(b->id()).ok()) << "no goodbye";
    ASSERT_TRUE(reconnect().ok());
    ASSERT_TRUE(eventually([&] { return b->renewedCount() == round; }));
    halfPuts += part.word(64).load() != stampOf(stamp);
    stamp += 1;
    const Bytes again = pattern(3000, stamp);
    ASSERT_TRUE(toB->put({part.remote(), 128, again, {64, stampOf(stamp)}}).ok());
    ASSERT_TRUE(eventually([&] { return part.word(64).load() == stampOf(stamp); }));
    EXPECT_TRUE(part.holds(128, again));
  }
  EXPECT_GT(lostGets, 0u);
  EXPECT_GT(halfPuts + lostCompletions, 0u);
  EXPECT_EQ(b->acceptedCount(), 1u);
}

TEST_F(SimWire, AGoodbyeIsHeardAcrossABreak) {
  connect(1);
  auto part = b->part(4096);
  ASSERT_TRUE(toA->send(Bytes(1)).ok());
  ASSERT_EQ(a->messagesFrom(b->id(), 1).size(), 1u);
  ASSERT_TRUE(toB->put({part.remote(), 128, {}, {64, 1}}).ok());
  ASSERT_TRUE(eventually([&] { return a->endedCount() == 1; }));
  toA->close();
  ASSERT_TRUE(eventually([&] { return a->endedCount() == 2; }));
  EXPECT_EQ(reconnect().code(), ErrorCode::kAborted);
}

// ---- cards that fail

TEST_F(SimWire, ATransferGoesOverAllCards) {
  connect({.cards = 3, .odds = kNothingElse, .breakOdds = 0});
  auto part = b->part(8 << 20);
  Bytes target(4 << 20);
  Completion completion(&bell);
  ASSERT_TRUE(toB->get({part.remote(), 0, target, &completion}).ok());
  EXPECT_EQ(endOf(completion), ErrorCode::kOk);
  for (size_t i = 0; i < 3; ++i) EXPECT_GT(cardsOfB->carried(i), 20u) << i;
}

// No other transfer would keep the other cards busy.
TEST_F(SimWire, OneOfAMegabyteDoesSoWhenItIsAlone) {
  connect({.cards = 3, .odds = kNothingElse, .breakOdds = 0});
  auto part = b->part(1 << 20);
  Bytes target(1 << 20);
  Completion completion(&bell);
  ASSERT_TRUE(toB->get({part.remote(), 0, target, &completion}).ok());
  EXPECT_EQ(endOf(completion), ErrorCode::kOk);
  for (size_t i = 0; i < 3; ++i) EXPECT_GT(cardsOfB->carried(i), 3u) << i;
}

// The card reports that it does not reach its peer.
TEST_F(SimWire, ACardThatDiesIsLeftOutAndComesBack) {
  connect({.cards = 2, .odds = kNothingElse, .breakOdds = 0});
  auto part = b->part(kBytes + 4096);
  transferWhile(part, [&] { return stamp_ < 5; });
  cardsOfA->kill(1);
  transferWhile(part, [&] { return stamp_ < 50; });
  cardsOfA->revive(1);
  const uint64_t before = cardsOfA->carried(1);
  transferWhile(part, [&] { return cardsOfA->carried(1) < before + 20; });
  EXPECT_EQ(a->endedCount() + b->endedCount(), 0u);
}

// No error is reported: the packets have left, and never arrive.
TEST_F(SimWire, ACardThatLosesWhatItIsSentIsLeftOutAndComesBack) {
  connect({.cards = 2,
           .odds = kNothingElse,
           .breakOdds = 0,
           .channel = {.stallLimit = std::chrono::milliseconds(50)}});
  auto part = b->part(kBytes + 4096);
  transferWhile(part, [&] { return stamp_ < 5; });
  cardsOfB->kill(0);
  transferWhile(part, [&] { return stamp_ < 50; });
  cardsOfB->revive(0);
  const uint64_t before = cardsOfA->carried(0);
  transferWhile(part, [&] { return cardsOfA->carried(0) < before + 20; });
  EXPECT_EQ(a->endedCount() + b->endedCount(), 0u);
}

TEST_F(SimWire, WithoutAnyCardTheConnectionBreaks) {
  connect({.cards = 2,
           .odds = kNothingElse,
           .breakOdds = 0,
           .channel = {.stallLimit = std::chrono::milliseconds(20),
                       .pathLimit = std::chrono::milliseconds(100)}});
  auto part = b->part(kBytes + 4096);
  transferWhile(part, [&] { return stamp_ < 5; });
  cardsOfA->kill(0);
  cardsOfA->kill(1);
  Bytes target(kBytes);
  Completion completion(&bell);
  ASSERT_TRUE(toB->get({part.remote(), 4096, target, &completion}).ok());
  EXPECT_EQ(endOf(completion), ErrorCode::kPeerLost);
  const Status how = a->endOf(b->id());
  EXPECT_NE(how.error().message.find("answers over tcp"), std::string::npos) << how.error().message;
  // Messages are refused, too, as on any connection that broke; the peer's still come.
  EXPECT_EQ(toB->send(Bytes(1)).code(), ErrorCode::kPeerLost);
  ASSERT_TRUE(toA->send(Bytes(1)).ok());
  EXPECT_EQ(a->messagesFrom(b->id(), 1).size(), 1u);
  // TCP alone is no connection.
  EXPECT_EQ(reconnect(std::chrono::milliseconds(200)).code(), ErrorCode::kPeerLost);
  EXPECT_EQ(a->endedCount(), 1u) << "told by the answer alone";
  cardsOfA->revive(0);
  ASSERT_TRUE(reconnect().ok());
  transferWhile(part, [&] { return stamp_ < 10; });
}

// A peer that does not answer over TCP either is slow or gone. The cards do not decide that.
TEST_F(SimWire, ASilentPeerIsNoBrokenPath) {
  connect({.cards = 1,
           .odds = kNothingElse,
           .breakOdds = 0,
           .channel = {.stallLimit = std::chrono::milliseconds(20),
                       .pathLimit = std::chrono::milliseconds(50)}});
  auto part = b->part(kBytes + 4096);
  transferWhile(part, [&] { return stamp_ < 5; });
  std::promise<void> release;
  std::atomic<bool> isHeld{false};
  b->loop().post([&] {
    isHeld = true;
    release.get_future().wait_for(kPatience);
  });
  ASSERT_TRUE(eventually([&] { return isHeld.load(); }));
  Bytes target(kBytes);
  Completion completion(&bell);
  ASSERT_TRUE(toB->get({part.remote(), 4096, target, &completion}).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // many times the limit
  EXPECT_FALSE(completion.finished());
  EXPECT_EQ(a->endedCount(), 0u);
  release.set_value();
  EXPECT_EQ(endOf(completion), ErrorCode::kOk);
}

TEST(SimRegistry, OnlyWhenAskedFor) {
  EngineOptions options{.logName = "engine", .arenaBytes = size_t(1) << 30};
  options.env.hostIp = "127.0.0.1";
  options.jobKey = Bytes(32, std::byte{7});
  const auto offers = [](const EngineOptions& options) {
    const auto engine = Engine::create(options);
    EXPECT_TRUE(engine.ok());
    const Bytes endpoint = (*engine)->endpoint(), name = bytesOf("sim");
    return std::search(endpoint.begin(), endpoint.end(), name.begin(), name.end()) !=
           endpoint.end();
  };
  EXPECT_FALSE(offers(options));
  options.env.transports = {"sim"};
  EXPECT_TRUE(offers(options));
}

}  // namespace
}  // namespace mooncake::testing
