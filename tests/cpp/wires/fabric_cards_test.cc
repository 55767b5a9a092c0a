// Transfers that cards carry out by themselves. Their bytes arrive; those of transfers that were
// given up do not.
#include "transport_suite.h"
#include "wires/fabric/libfabric_transport.h"
#include "wires/nic/libfabric/cards.h"
#include "wires/sim/sim_transport.h"
#include "wires/stream/wire.h"
#include "wires/tcp/tcp_transport.h"

namespace mooncake::testing {
namespace {

constexpr SimOdds kNothing{.failed = 0, .late = 0, .lost = 0, .storm = 0, .death = 0};
constexpr size_t kBig = size_t(1) << 20;

Result<std::unique_ptr<Transport>> simWith(const TransportContext& context, SimOdds odds,
                                           bool withdrawalStops, bool closeEndsReads = true) {
  return createSimTransport(context, TcpTransport::create,
                            {.cards = 2,
                             .odds = odds,
                             .withdrawalStops = withdrawalStops,
                             .closeEndsReads = closeEndsReads,
                             .breakOdds = 0,
                             .channel = {.splitBytes = 500'000}});
}

struct SimThatStops {
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context) {
    return simWith(context, kNothing, true);
  }
};
struct SimThatGoesOn {
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context) {
    return simWith(context, kNothing, false);
  }
};
// Half of the operations that the card reports as failed arrive afterwards.
struct SimThatIsLate {
  static constexpr SimOdds kOdds{.failed = 60, .late = 15, .lost = 60, .storm = 50, .death = 0};
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context) {
    return simWith(context, kOdds, true);
  }
};
struct SimThatIsLateAndGoesOn {
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context) {
    return simWith(context, SimThatIsLate::kOdds, false);
  }
};
// Gets are carried out as writes of the other end.
struct SimThatIsAsked {
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context) {
    return simWith(context, kNothing, true, false);
  }
};
struct SimThatIsAskedAndLateAndGoesOn {
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context) {
    return simWith(context, SimThatIsLate::kOdds, false, false);
  }
};
struct TcpRxm {
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context) {
    FabricEnv env;
    env.requiredProvider = "tcp;ofi_rxm";
    env.devices = {"127.0.0.1"};
    return createLibfabricTransport(context, TcpTransport::create, env);
  }
};

// Memory with a long-lived registration.
struct User {
  User(WireEnd& end, size_t bytes, uint32_t rights = kRemoteRead | kRemoteWrite) : memory(bytes) {
    auto added = end.regions().add(memory.data(), bytes, rights | kLasting);
    EXPECT_TRUE(added.ok());
    if (added.ok()) region = std::move(*added);
  }
  bool holds(size_t offset, ByteView data) const {
    return std::equal(data.begin(), data.end(), memory.begin() + static_cast<ptrdiff_t>(offset));
  }
  std::span<std::byte> at(size_t offset, size_t bytes) {
    return std::span(memory).subspan(offset, bytes);
  }
  Bytes memory;
  MemoryRegion region;
};

uint64_t movedOn(const std::shared_ptr<Channel>& channel) {
  return std::static_pointer_cast<FabricChannel>(channel)->moved();
}

template <typename Wire>
class FabricCards : public ConnectedTest {
 protected:
  struct End : WireEnd {
    End() : WireEnd(onLoopback(), Wire::create) {}
  };
  void SetUp() override { connect(a, b); }

  ErrorCode write(Channel& channel, const User& to, uint64_t offset, ByteView data) {
    Completion completion(&bell);
    const Status begun = channel.write({to.region.remote(), offset, data, &completion});
    return begun.ok() ? endOf(completion) : begun.code();
  }
  ErrorCode get(Channel& channel, const User& from, uint64_t offset, std::span<std::byte> target) {
    Completion completion(&bell);
    const Status begun = channel.get({from.region.remote(), offset, target, &completion});
    return begun.ok() ? endOf(completion) : begun.code();
  }
  // Writes until a card has moved one. The first writes go as packets, while keys are asked for.
  ::testing::AssertionResult goesByCards(const std::shared_ptr<Channel>& channel, User& here,
                                         const User& there) {
    const uint64_t before = movedOn(channel);
    return eventually([&] {
      EXPECT_EQ(write(*channel, there, 0, here.at(0, 100'000)), ErrorCode::kOk);
      return movedOn(channel) > before;
    });
  }

  // The fence is that of the end that gets, if `asks`; else that of the memory's owner.
  void getBehindAFence(bool asks) {
    User here(a, 8 * kBig), there(b, 8 * kBig);
    ASSERT_TRUE(goesByCards(toB, here, there));
    EXPECT_EQ(get(*toB, there, 0, here.at(0, kBig)), ErrorCode::kOk);
    std::ranges::fill(here.memory, std::byte{1});
    std::ranges::fill(there.memory, std::byte{7});
    Completion gets(&bell);
    for (size_t i = 0; i < 8; ++i) {
      ASSERT_TRUE(toB->get({there.region.remote(), i * kBig, here.at(i * kBig, kBig), &gets}).ok());
    }
    ASSERT_TRUE(eventually([&] { return peek(here.memory.data() + kBig) == std::byte{7}; }));
    (asks ? toB : toA)->fence();
    const ErrorCode end = endOf(gets);
    EXPECT_TRUE(end == ErrorCode::kOk || end == ErrorCode::kAborted) << errorCodeName(end);
    std::ranges::fill(here.memory, std::byte{1});
    std::this_thread::sleep_for(3 * kNothing.lateness);
    EXPECT_TRUE(std::ranges::all_of(here.memory, [](std::byte b) { return b == std::byte{1}; }));
  }

  // Cancels transfers while another thread ends the channel. Their completion goes at once.
  void cancelBeside(const std::function<void(Channel&)>& end) {
    constexpr size_t kCount = 64, kEach = 64 << 10;
    User here(a, 2 * kCount * kEach), there(b, 2 * kCount * kEach);
    ASSERT_TRUE(goesByCards(toB, here, there));
    EXPECT_EQ(get(*toB, there, 0, here.at(0, kEach)), ErrorCode::kOk);
    std::promise<void> mayRead;
    b.loop().post([until = mayRead.get_future().share()] { until.wait(); });
    auto completion = std::make_unique<Completion>(&bell);
    for (size_t i = 0; i < kCount; ++i) {
      const uint64_t offset = i * kEach, behind = (kCount + i) * kEach;
      ASSERT_TRUE(toB->get({there.region.remote(), offset, here.at(offset, kEach),  //
                            completion.get()})
                      .ok());
      ASSERT_TRUE(toB->write({there.region.remote(), behind, here.at(behind, kEach),  //
                              completion.get()})
                      .ok());
    }
    std::thread ender([&] { end(*toB); });
    // The end is under way when nothing new may begin.
    EXPECT_TRUE(eventually([&] {
      Completion late(&bell);
      const Status begun = toB->get({there.region.remote(), 0, here.at(0, 1), &late});
      if (begun.ok()) toB->cancel(&late);
      return begun.code() == ErrorCode::kAborted;
    }));
    toB->cancel(completion.get());
    EXPECT_TRUE(completion->finished()) << completion->pending << " have not ended";
    const ErrorCode how = completion->error;
    EXPECT_TRUE(how == ErrorCode::kOk || how == ErrorCode::kAborted) << errorCodeName(how);
    std::ranges::fill(here.at(0, kCount * kEach), std::byte{1});
    mayRead.set_value();
    ender.join();
    std::this_thread::sleep_for(3 * kNothing.lateness);
    EXPECT_TRUE(here.holds(0, Bytes(kCount * kEach, std::byte{1})));
  }

  End a, b;
};

using Wires = ::testing::Types<SimThatStops, SimThatGoesOn, SimThatIsLate, SimThatIsLateAndGoesOn,
                               SimThatIsAsked, SimThatIsAskedAndLateAndGoesOn, TcpRxm>;
TYPED_TEST_SUITE(FabricCards, Wires);

// Cards still move memory after a second registration with the same beginning, and after its end.
TYPED_TEST(FabricCards, MoveMemoryThatIsAddedTwice) {
  User here(this->a, 2 * kBig), there(this->b, 2 * kBig);
  ASSERT_TRUE(this->goesByCards(this->toB, here, there));
  const auto whole = here.at(0, 2 * kBig);
  const auto moves = [&] {
    const uint64_t before = movedOn(this->toB);
    EXPECT_EQ(this->write(*this->toB, there, 0, whole), ErrorCode::kOk);
    return movedOn(this->toB) - before;
  };
  auto part = this->a.regions().add(whole.data(), kBig, kRemoteRead | kLasting);
  ASSERT_TRUE(part.ok());
  // A late write withdraws keys; they are asked for again.
  EXPECT_TRUE(eventually([&] { return moves() > 0; }));
  part = Error{ErrorCode::kAborted, "let go of"};
  EXPECT_TRUE(eventually([&] { return moves() > 0; }));
}

TYPED_TEST(FabricCards, MoveWhatIsRegisteredAtBothEnds) {
  User here(this->a, 6 * kBig), there(this->b, 6 * kBig);
  ASSERT_TRUE(this->goesByCards(this->toB, here, there));
  uint64_t seed = 0;
  for (const size_t bytes : {size_t(16) << 10, size_t(100'003), kBig, 5 * kBig + 77}) {
    const Bytes data = pattern(bytes, ++seed);
    std::copy(data.begin(), data.end(), here.memory.begin() + 33);
    EXPECT_EQ(this->write(*this->toB, there, 7, here.at(33, bytes)), ErrorCode::kOk) << bytes;
    EXPECT_TRUE(there.holds(7, data)) << bytes;
    std::ranges::fill(here.memory, std::byte{});
    EXPECT_EQ(this->get(*this->toB, there, 7, here.at(11, bytes)), ErrorCode::kOk) << bytes;
    EXPECT_TRUE(here.holds(11, data)) << bytes;
    EXPECT_EQ(here.memory[11 + bytes], std::byte{0});
    EXPECT_EQ(here.memory[10], std::byte{0});
  }
  EXPECT_GT(movedOn(this->toB), 2 * 100'000u);
}

// A card carries out a get by reads, or the other end's card does by writes.
TYPED_TEST(FabricCards, GetsAreNoPackets) {
  User here(this->a, 2 * kBig), there(this->b, 2 * kBig), landing(this->a, kBig, kLanding);
  const Bytes data = pattern(kBig, 3);
  std::copy(data.begin(), data.end(), there.memory.begin() + 5);
  for (const auto target : {here.at(9, kBig), landing.at(0, kBig)}) {
    ASSERT_TRUE(eventually([&] {
      const uint64_t before = movedOn(this->toB);
      EXPECT_EQ(this->get(*this->toB, there, 5, target), ErrorCode::kOk);
      EXPECT_TRUE(std::ranges::equal(target, data));
      return movedOn(this->toB) >= before + kBig;
    }));
  }
}

// A peer writes into memory for fetched data only when it is asked to.
TYPED_TEST(FabricCards, LandingsAreNotWritable) {
  User here(this->a, kBig), there(this->b, kBig), landing(this->b, kBig, kLanding);
  ASSERT_TRUE(this->goesByCards(this->toB, here, there));
  for (int i = 0; i < 3; ++i)
    EXPECT_EQ(this->write(*this->toB, landing, 0, here.memory), ErrorCode::kRefused);
  for (int i = 0; i < 3; ++i)
    EXPECT_EQ(this->get(*this->toB, landing, 0, here.memory), ErrorCode::kRefused);
}

TYPED_TEST(FabricCards, ManyGetsAtOnce) {
  constexpr size_t kEach = 20'000, kCount = 1100;
  User here(this->a, kCount * kEach), there(this->b, kCount * kEach);
  const Bytes data = pattern(there.memory.size(), 4);
  std::ranges::copy(data, there.memory.begin());
  for (int round = 0; round < 2; ++round) {
    std::ranges::fill(here.memory, std::byte{});
    Completion completion(&this->bell);
    std::vector<GetRequest> requests;
    for (size_t i = 0; i < kCount; ++i) {
      requests.push_back(
          {there.region.remote(), i * kEach, here.at(i * kEach, kEach), &completion});
    }
    // The last one is small; later it is out of range.
    requests.push_back({there.region.remote(), 0, here.at(0, 100), &completion});
    ASSERT_TRUE(this->toB->get(requests).ok());
    EXPECT_EQ(endOf(completion), ErrorCode::kOk);
    EXPECT_EQ(here.memory, data);
    requests.back().offset = there.memory.size() - 99;
    ASSERT_TRUE(this->toB->get(requests).ok());
    EXPECT_EQ(endOf(completion), ErrorCode::kRefused);
  }
}

TYPED_TEST(FabricCards, LeaveToPacketsWhatIsSmallOrNotRegisteredForLong) {
  User here(this->a, kBig), there(this->b, kBig);
  ASSERT_TRUE(this->goesByCards(this->toB, here, there));
  const uint64_t moved = movedOn(this->toB);
  EXPECT_EQ(this->get(*this->toB, there, 0, here.at(0, 1000)), ErrorCode::kOk);
  Bytes plain(kBig);
  EXPECT_EQ(this->get(*this->toB, there, 0, plain), ErrorCode::kOk);
  auto brief = this->b.regions().add(plain.data(), plain.size(), kRemoteRead);
  Completion completion(&this->bell);
  ASSERT_TRUE(this->toB->get({brief->remote(), 0, here.at(0, kBig), &completion}).ok());
  EXPECT_EQ(endOf(completion), ErrorCode::kOk);
  EXPECT_EQ(movedOn(this->toB), moved);
}

TYPED_TEST(FabricCards, RefuseWhatTheOwnerRefuses) {
  constexpr size_t kEach = 100'000;
  User here(this->a, kBig), there(this->b, kBig), readable(this->b, kBig, kRemoteRead),
      closed(this->b, kBig, 0);
  ASSERT_TRUE(this->goesByCards(this->toB, here, there));
  const Bytes before = there.memory;
  std::ranges::fill(here.memory, std::byte{9});
  for (int i = 0; i < 3; ++i) {  // before its keys were asked for, and after
    EXPECT_EQ(this->write(*this->toB, there, kBig - kEach + 1, here.at(0, kEach)),
              ErrorCode::kRefused);
    EXPECT_EQ(this->write(*this->toB, there, ~uint64_t(0) - 10, here.at(0, kEach)),
              ErrorCode::kRefused);
    EXPECT_EQ(this->write(*this->toB, readable, 0, here.at(0, kEach)), ErrorCode::kRefused);
    EXPECT_EQ(this->get(*this->toB, closed, 0, here.at(0, kEach)), ErrorCode::kRefused);
    EXPECT_EQ(this->get(*this->toB, readable, 0, here.at(kEach, kEach)), ErrorCode::kOk);
    std::ranges::fill(here.memory, std::byte{9});
  }
  RemoteRegion unknown = there.region.remote();
  unknown.key += 0x100000;
  Completion completion(&this->bell);
  ASSERT_TRUE(this->toB->write({unknown, 0, here.at(0, kEach), &completion}).ok());
  EXPECT_EQ(endOf(completion), ErrorCode::kRefused);
  EXPECT_EQ(there.memory, before);
  const auto isZero = [](std::byte b) { return b == std::byte{0}; };
  EXPECT_TRUE(std::ranges::all_of(readable.memory, isZero));
  EXPECT_TRUE(std::ranges::all_of(closed.memory, isZero));
}

TYPED_TEST(FabricCards, ARegionThatIsRevokedIsNotReachedAnyMore) {
  User here(this->a, 4 * kBig), other(this->b, kBig);
  std::ranges::fill(here.memory, std::byte{7});
  for (int round = 0; round < 5; ++round) {
    User there(this->b, 4 * kBig);
    ASSERT_TRUE(this->goesByCards(this->toB, here, there));
    Completion under(&this->bell);
    const RemoteRegion remote = there.region.remote();
    for (size_t i = 0; i < 4; ++i)
      ASSERT_TRUE(this->toB->write({remote, i * kBig, here.at(i * kBig, kBig), &under}).ok());
    there.region = MemoryRegion();
    std::ranges::fill(there.memory, std::byte{1});
    const ErrorCode end = endOf(under);
    EXPECT_TRUE(end == ErrorCode::kOk || end == ErrorCode::kRefused) << errorCodeName(end);
    Completion late(&this->bell);
    ASSERT_TRUE(this->toB->write({remote, 0, here.at(0, kBig), &late}).ok());
    EXPECT_EQ(endOf(late), ErrorCode::kRefused);
    EXPECT_TRUE(std::ranges::all_of(there.memory, [](std::byte b) { return b == std::byte{1}; }));
    EXPECT_EQ(this->write(*this->toB, other, 0, here.at(0, kBig)), ErrorCode::kOk);
  }
}

TYPED_TEST(FabricCards, NothingLandsBehindAFence) {
  User here(this->a, 8 * kBig), there(this->b, 8 * kBig);
  std::ranges::fill(here.memory, std::byte{7});
  ASSERT_TRUE(this->goesByCards(this->toB, here, there));
  Completion writes(&this->bell);
  for (size_t i = 0; i < 8; ++i) {
    ASSERT_TRUE(
        this->toB->write({there.region.remote(), i * kBig, here.at(i * kBig, kBig), &writes}).ok());
  }
  ASSERT_TRUE(eventually([&] { return peek(there.memory.data() + kBig) == std::byte{7}; }));
  this->toA->fence();
  std::ranges::fill(there.memory, std::byte{1});
  const ErrorCode end = endOf(writes);
  EXPECT_TRUE(end == ErrorCode::kOk || end == ErrorCode::kAborted) << errorCodeName(end);
  EXPECT_EQ(this->write(*this->toB, there, 0, here.at(0, kBig)), ErrorCode::kAborted);
  // Longer than any write is late.
  std::this_thread::sleep_for(3 * kNothing.lateness);
  EXPECT_TRUE(std::ranges::all_of(there.memory, [](std::byte b) { return b == std::byte{1}; }));
}

TYPED_TEST(FabricCards, NothingOfAGetLandsBehindAFenceOfWhoAsks) { this->getBehindAFence(true); }
TYPED_TEST(FabricCards, NothingOfAGetLandsBehindAFenceOfTheOwner) { this->getBehindAFence(false); }

TYPED_TEST(FabricCards, FencesOfSeveralPeersBeginTogether) {
  typename TestFixture::End c;
  auto connected = connectNow(this->a, c);
  ASSERT_TRUE(connected.ok());
  const std::vector<std::shared_ptr<Channel>> channels{this->toB, *connected};
  User here(this->a, 16 * kBig), atB(this->b, 8 * kBig), atC(c, 8 * kBig);
  const User* const there[] = {&atB, &atC};
  Completion gets(&this->bell);
  for (size_t i = 0; i < 2; ++i) {
    ASSERT_TRUE(this->goesByCards(channels[i], here, *there[i]));
    for (size_t piece = 0; piece < 8; ++piece) {
      const auto target = here.at((8 * i + piece) * kBig, kBig);
      ASSERT_TRUE(channels[i]->get({there[i]->region.remote(), piece * kBig, target, &gets}).ok());
    }
  }
  for (const auto& channel : channels) channel->beginFence();
  for (size_t i = 0; i < 2; ++i) {
    Completion late(&this->bell);
    const Status begun = channels[i]->get({there[i]->region.remote(), 0, here.at(0, 1), &late});
    EXPECT_EQ(begun.code(), ErrorCode::kAborted) << "before any fence has ended";
  }
  for (const auto& channel : channels) channel->fence();
  ASSERT_TRUE(gets.finished());
  std::ranges::fill(here.memory, std::byte{1});
  std::this_thread::sleep_for(3 * kNothing.lateness);
  EXPECT_TRUE(std::ranges::all_of(here.memory, [](std::byte b) { return b == std::byte{1}; }));
  channels[1]->close();
}

TYPED_TEST(FabricCards, OthersGoOnBesideAFence) {
  typename TestFixture::End c;
  auto connected = connectNow(c, this->b);
  ASSERT_TRUE(connected.ok());
  const auto cToB = std::move(*connected);
  User here(this->a, kBig), third(c, kBig), there(this->b, 2 * kBig);
  ASSERT_TRUE(this->goesByCards(this->toB, here, there));
  ASSERT_TRUE(this->goesByCards(cToB, third, there));
  const Bytes data = pattern(kBig, 5);
  std::copy(data.begin(), data.end(), third.memory.begin());
  Completion writes(&this->bell);
  for (size_t i = 0; i < 8; ++i)
    ASSERT_TRUE(cToB->write({there.region.remote(), kBig, third.memory, &writes}).ok());
  this->toA->fence();
  EXPECT_EQ(endOf(writes), ErrorCode::kOk);
  EXPECT_TRUE(there.holds(kBig, data));
  EXPECT_TRUE(this->goesByCards(cToB, third, there)) << "under new keys";
  cToB->close();
}

TYPED_TEST(FabricCards, WhatIsCancelledIsNotTouchedAnyMore) {
  User here(this->a, 8 * kBig), there(this->b, 8 * kBig);
  std::ranges::fill(there.memory, std::byte{7});
  ASSERT_TRUE(this->goesByCards(this->toB, here, there));
  std::ranges::fill(there.memory, std::byte{7});
  for (int round = 0; round < 5; ++round) {
    Completion gets(&this->bell), kept(&this->bell);
    for (size_t i = 0; i < 7; ++i) {
      ASSERT_TRUE(
          this->toB->get({there.region.remote(), i * kBig, here.at(i * kBig, kBig), &gets}).ok());
    }
    ASSERT_TRUE(this->toB->get({there.region.remote(), 0, here.at(7 * kBig, kBig), &kept}).ok());
    this->toB->cancel(&gets);
    ASSERT_TRUE(gets.finished());
    std::ranges::fill(here.at(0, 7 * kBig), std::byte{1});
    EXPECT_EQ(endOf(kept), ErrorCode::kOk);
    EXPECT_TRUE(here.holds(7 * kBig, Bytes(kBig, std::byte{7})));
    EXPECT_TRUE(here.holds(0, Bytes(7 * kBig, std::byte{1})));
  }
}

TYPED_TEST(FabricCards, CancelBesideAFenceWaitsForTheEnd) {
  this->cancelBeside([](Channel& channel) { channel.fence(); });
}
TYPED_TEST(FabricCards, CancelBesideACloseWaitsForTheEnd) {
  this->cancelBeside([](Channel& channel) { channel.close(); });
}

TYPED_TEST(FabricCards, CloseEndsWhatIsUnderWay) {
  User here(this->a, 8 * kBig), there(this->b, 8 * kBig);
  ASSERT_TRUE(this->goesByCards(this->toB, here, there));
  Completion completion(&this->bell);
  ASSERT_TRUE(this->toB->get({there.region.remote(), 0, here.memory, &completion}).ok());
  this->toB->close();
  ASSERT_TRUE(completion.finished());
  std::ranges::fill(here.memory, std::byte{1});
  EXPECT_NE(this->b.endOf(this->a.id()).code(), ErrorCode::kTimeout);
  EXPECT_TRUE(std::ranges::all_of(here.memory, [](std::byte b) { return b == std::byte{1}; }));
}

// If the card still carries out a write that was given up, it must not overwrite later writes.
TYPED_TEST(FabricCards, AWriteThatComesLateLandsNowhere) {
  constexpr size_t kEach = 120'000;
  User here(this->a, 2 * kEach), there(this->b, kEach);
  ASSERT_TRUE(this->goesByCards(this->toB, here, there));
  for (uint64_t i = 0; i < 150; ++i) {
    const auto source = here.at(i % 2 * kEach, kEach);
    std::ranges::fill(source, static_cast<std::byte>(i));
    ASSERT_EQ(this->write(*this->toB, there, 0, source), ErrorCode::kOk);
    ASSERT_TRUE(there.holds(0, source)) << i;
  }
  const Bytes last = there.memory;
  std::this_thread::sleep_for(3 * kNothing.lateness);
  EXPECT_EQ(there.memory, last);
}

TYPED_TEST(FabricCards, AGetThatComesLateLandsNowhere) {
  constexpr size_t kEach = 120'000;
  User here(this->a, kEach), there(this->b, kEach);
  ASSERT_TRUE(this->goesByCards(this->toB, here, there));
  for (uint64_t i = 0; i < 150; ++i) {
    std::ranges::fill(there.memory, static_cast<std::byte>(i));
    ASSERT_EQ(this->get(*this->toB, there, 0, here.memory), ErrorCode::kOk);
    ASSERT_TRUE(here.holds(0, there.memory)) << i;
  }
  const Bytes last = here.memory;
  std::this_thread::sleep_for(3 * kNothing.lateness);
  EXPECT_EQ(here.memory, last);
}

TYPED_TEST(FabricCards, WhatIsRevokedIsNotReadAnyMore) {
  User here(this->a, 4 * kBig);
  for (int round = 0; round < 5; ++round) {
    User there(this->b, 4 * kBig);
    std::ranges::fill(there.memory, std::byte{7});
    EXPECT_EQ(this->get(*this->toB, there, 0, here.at(0, kBig)), ErrorCode::kOk);
    Completion under(&this->bell);
    // A second registration of the same memory, not long-lived. The rounds revoke the two in turn.
    auto brief = this->b.regions().add(there.memory.data(), there.memory.size(), kRemoteRead);
    MemoryRegion& revoked = round % 2 == 0 ? there.region : *brief;
    const RemoteRegion remote = revoked.remote();
    for (size_t i = 0; i < 4; ++i)
      ASSERT_TRUE(this->toB->get({remote, i * kBig, here.at(i * kBig, kBig), &under}).ok());
    revoked = MemoryRegion();
    std::ranges::fill(there.memory, std::byte{1});
    const ErrorCode end = endOf(under);
    ASSERT_TRUE(end == ErrorCode::kOk || end == ErrorCode::kRefused) << errorCodeName(end);
    const bool isThere = here.holds(0, Bytes(4 * kBig, std::byte{7}));
    ASSERT_TRUE(isThere || end == ErrorCode::kRefused);
    Completion late(&this->bell);
    ASSERT_TRUE(this->toB->get({remote, 0, here.at(0, kBig), &late}).ok());
    EXPECT_EQ(endOf(late), ErrorCode::kRefused);
  }
}

// ---- a connection that is made again

class FabricCardsAgain : public ConnectedTest {
 protected:
  // Gets until a card has moved one.
  ::testing::AssertionResult getsByCards(User& here, const User& there) {
    const uint64_t before = movedOn(toB);
    return eventually([&] {
      Completion completion(&bell);
      EXPECT_TRUE(toB->get({there.region.remote(), 0, here.memory, &completion}).ok());
      EXPECT_EQ(endOf(completion), ErrorCode::kOk);
      return movedOn(toB) > before;
    });
  }

  // Uses the memory for something else, and looks for late bytes.
  static bool staysAsItIs(User& user) {
    std::ranges::fill(user.memory, std::byte{0xee});
    std::this_thread::sleep_for(2 * kLate.lateness);
    return std::ranges::all_of(user.memory, [](std::byte b) { return b == std::byte{0xee}; });
  }

  static constexpr SimOdds kLate{.failed = 0,
                                 .late = 0,
                                 .lateWrites = 2,
                                 .lost = 0,
                                 .storm = 0,
                                 .death = 0,
                                 .lateness = std::chrono::milliseconds(150)};
  static auto createUnbroken(bool withdrawalStops) {
    return [=](const TransportContext& context) {
      return createSimTransport(
          context, TcpTransport::create,
          {.cards = 2, .odds = kLate, .withdrawalStops = withdrawalStops, .breakOdds = 0});
    };
  }
  static auto create(const std::shared_ptr<SimCards>& cards, bool withdrawalStops,
                     bool closeEndsReads = true) {
    return [=](const TransportContext& context) {
      return createSimTransport(context, TcpTransport::create,
                                {.cards = 2,
                                 .odds = cards ? SimThatIsLate::kOdds : kLate,
                                 .withdrawalStops = withdrawalStops,
                                 .closeEndsReads = closeEndsReads,
                                 .breakOdds = cards ? 0u : 60u,
                                 .made = cards,
                                 .channel = {.stallLimit = std::chrono::milliseconds(20),
                                             .pathLimit = std::chrono::seconds(10)}});
    };
  }
};

// Several writes are under way when the connection breaks. They come late, when other data has been
// written in their place.
TEST_F(FabricCardsAgain, NothingOfTheOldOneLands) {
  for (const bool stops : {true, false}) {
    WireEnd a(onLoopback(), create(nullptr, stops)), b(onLoopback(), create(nullptr, stops));
    connect(a, b);
    constexpr size_t kEach = 40'000, kSlots = 8;
    User here(a, 2 * kSlots * kEach), there(b, kSlots * kEach);
    size_t breaks = 0, seen = 0;
    for (uint64_t i = 0; seen < 5 && i < 3000; ++i) {
      const auto source = here.at(i % 2 * kSlots * kEach, kSlots * kEach);
      std::ranges::fill(source, static_cast<std::byte>(i));
      Completion completion(&bell);
      Status begun;
      for (size_t slot = 0; slot < kSlots && begun.ok(); ++slot) {
        begun = toB->write({there.region.remote(), slot * kEach,
                            source.subspan(slot * kEach, kEach), &completion});
      }
      const ErrorCode end = endOf(completion);
      if (begun.ok() && end == ErrorCode::kOk) {
        ASSERT_TRUE(there.holds(0, source)) << i;
        if (seen == breaks) continue;
        std::this_thread::sleep_for(2 * kLate.lateness);
        ASSERT_TRUE(there.holds(0, source)) << i;
        seen = breaks;
        continue;
      }
      ++breaks;
      ASSERT_TRUE(eventually([&] { return a.endedCount() == breaks; }));
      ASSERT_TRUE(reconnect(a, b).ok());
      ASSERT_TRUE(eventually([&] { return b.renewedCount() == breaks; }));
    }
    EXPECT_EQ(seen, 5u);
    EXPECT_GT(movedOn(toB), 0u);
    TearDown();
  }
}

// The other end's card writes the data that we get, and half of its writes are late.
TEST_F(FabricCardsAgain, NothingOfAGetOfTheOldOneLands) {
  for (const bool stops : {true, false}) {
    WireEnd a(onLoopback(), create(nullptr, stops, false));
    WireEnd b(onLoopback(), create(nullptr, stops, false));
    connect(a, b);
    constexpr size_t kEach = 40'000, kSlots = 8;
    User here(a, kSlots * kEach), there(b, kSlots * kEach);
    size_t breaks = 0;
    for (uint64_t i = 0; breaks < 5 && i < 3000; ++i) {
      std::ranges::fill(there.memory, static_cast<std::byte>(i));
      Completion completion(&bell);
      Status begun;
      for (size_t slot = 0; slot < kSlots && begun.ok(); ++slot) {
        begun = toB->get(
            {there.region.remote(), slot * kEach, here.at(slot * kEach, kEach), &completion});
      }
      const ErrorCode end = endOf(completion);
      if (begun.ok() && end == ErrorCode::kOk) {
        ASSERT_TRUE(here.holds(0, there.memory)) << i;
        continue;
      }
      std::ranges::fill(here.memory, std::byte{0xee});
      ++breaks;
      ASSERT_TRUE(eventually([&] { return a.endedCount() == breaks; }));
      std::this_thread::sleep_for(2 * kLate.lateness);
      ASSERT_TRUE(std::ranges::all_of(here.memory, [](std::byte b) {
        return b == std::byte{0xee};
      })) << i;
      ASSERT_TRUE(reconnect(a, b).ok());
      ASSERT_TRUE(eventually([&] { return b.renewedCount() == breaks; }));
    }
    EXPECT_EQ(breaks, 5u);
    EXPECT_GT(movedOn(toB), 0u);
    TearDown();
  }
}

// Half of the writes land up to 150 ms after their end. The owner uses the memory for something
// else as soon as the peer has confirmed that nothing lands any more. Without that confirmation
// late bytes must come, or this test could not fail.
TEST_F(FabricCardsAgain, NothingOfACancelledWriteLandsOnceItIsRetired) {
  constexpr size_t kEach = 40'000, kSlots = 8;
  for (const bool stops : {true, false}) {
    WireEnd a(onLoopback(), createUnbroken(stops)), b(onLoopback(), createUnbroken(stops));
    connect(a, b);
    User here(a, kSlots * kEach), there(b, kSlots * kEach);
    const auto landsLate = [&](bool isRetired) {
      std::ranges::fill(there.memory, std::byte{0});
      std::ranges::fill(here.memory, std::byte{1});
      Completion completion(&bell);
      for (size_t slot = 0; slot < kSlots; ++slot) {
        EXPECT_TRUE(toB->write({there.region.remote(), slot * kEach, here.at(slot * kEach, kEach),
                                &completion})
                        .ok());
      }
      toB->cancel(&completion);
      EXPECT_TRUE(completion.finished());
      if (isRetired) {
        const uint64_t number = toB->retire(there.region.remote());
        EXPECT_TRUE(eventually([&] { return toB->isRetired(number); }));
      }
      return !staysAsItIs(there);
    };
    const auto writesByCards = [&] {
      const uint64_t before = movedOn(toB);
      Completion completion(&bell);
      EXPECT_TRUE(toB->write({there.region.remote(), 0, here.at(0, kEach), &completion}).ok());
      return endOf(completion) == ErrorCode::kOk && movedOn(toB) > before;
    };
    size_t late = 0;
    for (int round = 0; round < 4; ++round) {
      ASSERT_TRUE(eventually(writesByCards));
      EXPECT_FALSE(landsLate(/*isRetired=*/true)) << round;
      ASSERT_TRUE(eventually(writesByCards));
      late += landsLate(/*isRetired=*/false);
    }
    EXPECT_GT(late, 0u);
    TearDown();
  }
}

// The break ends the writes, and cards still carry them out.
TEST_F(FabricCardsAgain, ARetirementIsConfirmedOnlyWhenTheConnectionStandsAgain) {
  constexpr size_t kEach = 40'000, kSlots = 8;
  for (const bool stops : {true, false}) {
    WireEnd a(onLoopback(), create(nullptr, stops)), b(onLoopback(), create(nullptr, stops));
    connect(a, b);
    User here(a, kSlots * kEach), there(b, kSlots * kEach);
    for (size_t breaks = 0; breaks < 3;) {
      Completion completion(&bell);
      Status begun;
      for (size_t slot = 0; slot < kSlots && begun.ok(); ++slot) {
        begun = toB->write(
            {there.region.remote(), slot * kEach, here.at(slot * kEach, kEach), &completion});
      }
      const ErrorCode end = endOf(completion);
      if (begun.ok() && end == ErrorCode::kOk) continue;
      ++breaks;
      const uint64_t number = toB->retire(there.region.remote());
      ASSERT_TRUE(eventually([&] { return a.endedCount() == breaks; }));
      EXPECT_FALSE(toB->isRetired(number));
      ASSERT_TRUE(reconnect(a, b).ok());
      ASSERT_TRUE(eventually([&] { return toB->isRetired(number); }));
      EXPECT_TRUE(staysAsItIs(there));
      ASSERT_TRUE(eventually([&] { return b.renewedCount() == breaks; }));
    }
    TearDown();
  }
}

// Packets that come between restart() and resume() are acknowledged, and land at resume().
TEST_F(FabricCardsAgain, ARetirementIsConfirmedBehindThePacketsThatAreHeld) {
  WireEnd a(onLoopback(), createUnbroken(true)), b(onLoopback(), createUnbroken(true));
  connect(a, b);
  const auto writer = std::static_pointer_cast<FabricChannel>(toB);
  const auto owner = std::static_pointer_cast<FabricChannel>(toA);
  std::promise<void> areAnew;
  b.loop().post([&] {  // so that `owner` reads the HELLO of `writer` behind its own restart
    std::promise<void> isAnew;
    a.loop().post([&] {
      writer->restart();
      writer->resume();
      isAnew.set_value();
    });
    isAnew.get_future().wait();
    owner->restart();
    areAnew.set_value();
  });
  areAnew.get_future().wait();
  constexpr size_t kSmall = 1000;  // packets carry it
  User here(a, kSmall), there(b, kSmall);
  std::ranges::fill(here.memory, std::byte{1});
  Completion completion(&bell);
  ASSERT_TRUE(eventually([&] {
    EXPECT_TRUE(toB->write({there.region.remote(), 0, here.memory, &completion}).ok());
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    return writer->unacknowledged() > 0;
  }));
  ASSERT_TRUE(eventually([&] { return writer->unacknowledged() == 0; }));
  toB->cancel(&completion);
  const uint64_t number = toB->retire(there.region.remote());
  std::this_thread::sleep_for(kLate.lateness);
  EXPECT_FALSE(toB->isRetired(number));
  EXPECT_FALSE(there.holds(0, here.memory));
  owner->resume();
  EXPECT_TRUE(there.holds(0, here.memory));
  EXPECT_TRUE(eventually([&] { return toB->isRetired(number); }));
}

// A card that is dead for a while, with writes on it: they leave over the other one.
TEST_F(FabricCardsAgain, ALinkThatComesBackBringsNothingOld) {
  for (const bool stops : {true, false}) {
    const auto cards = std::make_shared<SimCards>();
    WireEnd a(onLoopback(), create(cards, stops));
    WireEnd b(onLoopback(), create(std::make_shared<SimCards>(), stops));
    connect(a, b);
    constexpr size_t kEach = 120'000;
    User here(a, 4 * kEach), there(b, 2 * kEach);
    for (uint64_t i = 0; i < 60; ++i) {
      const auto source = here.at(i % 2 * 2 * kEach, 2 * kEach);
      std::ranges::fill(source, static_cast<std::byte>(i));
      Completion completion(&bell);
      for (size_t half = 0; half < 2; ++half) {
        ASSERT_TRUE(toB->write({there.region.remote(), half * kEach,
                                source.subspan(half * kEach, kEach), &completion})
                        .ok());
      }
      if (i % 20 == 5) cards->kill(i / 20 % 2);
      if (i % 20 == 15) cards->revive(i / 20 % 2);
      ASSERT_EQ(endOf(completion), ErrorCode::kOk);
      ASSERT_TRUE(there.holds(0, source)) << i;
    }
    EXPECT_GT(movedOn(toB), 10 * kEach);
    EXPECT_EQ(a.endedCount() + b.endedCount(), 0u);
    TearDown();
  }
}

// The owner holds only a limited number of gets that were given up. Further gets come as packets,
// in any order of its cards' writes.
TEST_F(FabricCardsAgain, AnOwnerKeepsOnlySoManyThatWereGivenUp) {
  const auto cards = std::make_shared<SimCards>();
  const auto with = [](const std::shared_ptr<SimCards>& made) {
    return [=](const TransportContext& context) {
      return createSimTransport(context, TcpTransport::create,
                                {.cards = 2,
                                 .odds = kNothing,
                                 .withdrawalStops = true,
                                 .closeEndsReads = false,
                                 .breakOdds = 0,
                                 .made = made,
                                 .channel = {.stallLimit = std::chrono::milliseconds(20),
                                             .pathLimit = std::chrono::seconds(60),
                                             .servedLimit = std::chrono::seconds(60)}});
    };
  };
  WireEnd a(onLoopback(), with(std::make_shared<SimCards>())), b(onLoopback(), with(cards));
  connect(a, b);
  constexpr size_t kEach = 20'000;
  // A get that is given up has its keys withdrawn, so each round has memory of its own. The memory
  // that is used last is registered last.
  User first(a, kEach), second(a, kEach), third(a, kEach), fourth(a, kEach), here(a, kEach);
  User there(b, kEach);
  std::ranges::fill(there.memory, std::byte{7});
  ASSERT_TRUE(getsByCards(here, there));
  for (size_t card = 0; card < 2; ++card) cards->kill(card);
  for (User* given : {&first, &second, &third}) {
    Completion gets(&bell);
    for (size_t i = 0; i < wire::kMaxTransfers / 2; ++i)
      ASSERT_TRUE(toB->get({there.region.remote(), 0, given->memory, &gets}).ok()) << i;
    toB->cancel(&gets);
    ASSERT_TRUE(gets.finished());
  }
  const uint64_t before = movedOn(toB);
  Completion last(&bell);
  ASSERT_TRUE(toB->get({there.region.remote(), 0, fourth.memory, &last}).ok());
  ASSERT_TRUE(toB->send(Bytes(1)).ok());
  ASSERT_EQ(b.messagesFrom(a.id(), 1).size(), 1u);  // the get's request has come before it
  for (size_t card = 0; card < 2; ++card) cards->revive(card);
  EXPECT_EQ(endOf(last), ErrorCode::kOk);
  EXPECT_EQ(movedOn(toB), before);
  EXPECT_EQ(fourth.memory, there.memory);
  for (const User* given : {&first, &second, &third}) EXPECT_EQ(given->memory, Bytes(kEach));
  // The gets that were given up have ended, and their places are free again.
  EXPECT_TRUE(getsByCards(here, there));
  EXPECT_EQ(a.endedCount() + b.endedCount(), 0u);
}

// A control message cannot leave. The get that needs its answer would wait for ever, so the
// connection breaks.
TEST_F(FabricCardsAgain, BreaksWhereThePeerDoesNotReadWhatItIsTold) {
  WireEnd a(onLoopback(), SimThatIsAsked::create), b(onLoopback(), SimThatIsAsked::create);
  connect(a, b);
  User here(a, kBig), there(b, kBig);
  ASSERT_TRUE(getsByCards(here, there));
  std::promise<void> reads;
  b.loop().post([until = reads.get_future().share()] { until.wait(); });
  for (const size_t bytes : {64 << 10, 1}) {  // until not even one byte is taken
    const Deadline deadline = Deadline::after(kPatience);
    Status sent;
    while (sent.ok() && !deadline.passed()) sent = toB->send(Bytes(bytes));
    EXPECT_EQ(sent.code(), ErrorCode::kExhausted);
  }
  Completion get(&bell);
  ASSERT_TRUE(toB->get({there.region.remote(), 0, here.memory, &get}).ok());
  EXPECT_EQ(endOf(get), ErrorCode::kPeerLost);
  EXPECT_EQ(a.endOf(b.id()).code(), ErrorCode::kPeerLost);
  reads.set_value();
}

}  // namespace
}  // namespace mooncake::testing
