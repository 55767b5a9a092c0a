#include <atomic>
#include <barrier>
#include <filesystem>
#include <fstream>
#include <future>
#include <gtest/gtest.h>
#include <random>
#include <sys/socket.h>
#include <thread>

#include "descriptor_limit.h"
#include "engine/engine.h"
#include "engine/route.h"
#include "engine_side.h"
#include "silent_listener.h"

// Peers that one side alone opens and forgets.
namespace mooncake {
namespace {

using mooncake::testing::eventually;
using mooncake::testing::pattern;
using std::chrono_literals::operator""s;
using std::chrono_literals::operator""ms;

std::shared_ptr<Engine> makeEngine(const std::string& wire, Bytes key = publicKey(),
                                   size_t dataThreads = 0) {
  EngineOptions options{.jobKey = std::move(key),
                        .logName = "engine",
                        .arenaBytes = size_t(1) << 30,
                        .dataThreads = dataThreads,
                        .peersReturn = true};
  options.env.transports = {wire};
  options.env.hostIp = "127.0.0.1";
  auto made = Engine::create(std::move(options));
  EXPECT_TRUE(made.ok()) << made.error().message;
  return made.ok() ? *made : nullptr;
}

Deadline soon() { return Deadline::after(20s); }

std::set<std::string> threadNames() {
  std::set<std::string> names;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(task.path() / "comm") >> name;
    names.insert(name);
  }
  return names;
}

// Returns the endpoint of the same engine with another port.
Bytes atPort(Bytes endpoint, uint16_t port) {
  const Bytes ofTcp = endpointFor("tcp", endpoint);
  const auto place = std::search(endpoint.begin(), endpoint.end(), ofTcp.begin(), ofTcp.end());
  std::memcpy(&*place + sizeof(uint16_t), &port, sizeof port);  // behind the version
  return endpoint;
}

class EngineOpen : public ::testing::TestWithParam<const char*> {
 protected:
  std::shared_ptr<Engine> make(size_t dataThreads = 0) {
    return makeEngine(GetParam(), publicKey(), dataThreads);
  }
  // Checks that bytes can be written to the peer, and read back.
  void expectWorks(const std::shared_ptr<Peer>& peer, Engine& owner, size_t bytes = 300000) {
    Bytes there(bytes), back(bytes);
    auto region = owner.regions().add(there.data(), there.size(), kRemoteRead | kRemoteWrite);
    ASSERT_TRUE(region.ok());
    const Bytes data = pattern(bytes, 1);
    Completion completion(&bell_);
    ASSERT_TRUE(peer->channel->write({region->remote(), 0, data, &completion}).ok());
    ASSERT_TRUE(eventually([&] { return completion.finished(); }));
    ASSERT_TRUE(peer->channel->get({region->remote(), 0, back, &completion}).ok());
    ASSERT_TRUE(eventually([&] { return completion.finished(); }));
    EXPECT_EQ(completion.error.load(), ErrorCode::kOk);
    EXPECT_TRUE(back == data);
  }

  Doorbell bell_;
};

TEST_P(EngineOpen, OneSideIsEnough) {
  const auto a = make(), b = make();
  for (auto [from, to] : {std::pair(a, b), std::pair(b, a)}) {
    auto peer = from->open(to->endpoint(), "a friend", soon());
    ASSERT_TRUE(peer.ok()) << peer.error().message;
    EXPECT_TRUE((*peer)->id == to->id());
    expectWorks(*peer, *to);
    const auto again = from->open(to->endpoint(), "a friend", soon());
    ASSERT_TRUE(again.ok());
    EXPECT_EQ(*again, *peer);
  }
  EXPECT_EQ(a->counters().opened, 1u) << "it was connected already when it opened the other one";
  EXPECT_EQ(b->counters().opened, 1u);
  EXPECT_EQ(a->counters().reused, 1u);
  EXPECT_EQ(b->counters().reused, 2u);
  const auto self = a->open(a->endpoint(), "myself", soon());
  ASSERT_TRUE(self.ok());
  EXPECT_EQ(*self, nullptr);
}

TEST_P(EngineOpen, TwoThatOpenEachOtherEndUpWithOneChannel) {
  for (int round = 0; round < 30; ++round) {
    const std::shared_ptr<Engine> engines[2] = {make(), make()};
    constexpr size_t kThreads = 3;  // of each engine
    std::barrier start(2 * kThreads);
    std::shared_ptr<Peer> found[2 * kThreads];
    std::vector<std::thread> threads;
    for (size_t i = 0; i < 2 * kThreads; ++i) {
      threads.emplace_back([&, i] {
        start.arrive_and_wait();
        auto peer = engines[i % 2]->open(engines[1 - i % 2]->endpoint(), "other", soon());
        ASSERT_TRUE(peer.ok()) << peer.error().message;
        found[i] = *peer;
      });
    }
    for (auto& thread : threads) thread.join();
    for (size_t i = 0; i < 2 * kThreads; ++i) {
      ASSERT_TRUE(found[i]);
      EXPECT_EQ(found[i], found[i % 2]);
      EXPECT_EQ(engines[i % 2]->counters().opened, 1u);
    }
    EXPECT_NE(found[0]->isOurs, found[1]->isOurs);
    expectWorks(found[0], *engines[1], 1000);
    expectWorks(found[1], *engines[0], 1000);
  }
}

TEST_P(EngineOpen, WhoIsForgottenCanBeOpenedAnew) {
  const auto a = make(), b = make();
  std::shared_ptr<Peer> last;
  for (int round = 0; round < 20; ++round) {
    // Every third round the other engine opens the peer. It first waits until it has read the
    // goodbye.
    const auto& from = round % 3 == 2 ? b : a;
    const auto& to = round % 3 == 2 ? a : b;
    if (round % 3 != 1) {
      ASSERT_TRUE(eventually([&] { return from->counters().active == 0; }));
    }
    auto peer = from->open(to->endpoint(), "other", soon());
    ASSERT_TRUE(peer.ok()) << round << ": " << peer.error().message;
    EXPECT_NE(*peer, last);
    expectWorks(*peer, *to, 1000);
    EXPECT_TRUE(from->forget(*peer, soon()).ok());
    EXPECT_TRUE((*peer)->disconnected);
    EXPECT_FALSE((*peer)->channel->send(Bytes(1)).ok());
    EXPECT_TRUE(from->forget(*peer, soon()).ok());
    last = *peer;
  }
}

// The peer's channel is closed, but the loop has not finished forget() yet.
TEST_P(EngineOpen, WhoIsBeingForgottenIsNotFound) {
  const Bytes ofNobody(sizeof(uint64_t), std::byte{77});  // a topic
  const auto a = make(), b = make();
  const auto old = a->open(b->endpoint(), "other", soon());
  ASSERT_TRUE(old.ok()) << old.error().message;
  std::promise<void> goOn;
  a->loop().post([until = goOn.get_future().share()] { until.wait_for(20s); });
  std::thread forgetting([&] { EXPECT_TRUE(a->forget(*old, soon()).ok()); });
  EXPECT_TRUE(eventually([&] { return !(*old)->channel->send(ofNobody).ok(); }));
  const auto meanwhile = a->open(b->endpoint(), "other", Deadline::after(50ms));
  EXPECT_FALSE(meanwhile.ok());
  goOn.set_value();
  forgetting.join();
  const auto peer = a->open(b->endpoint(), "other", soon());
  ASSERT_TRUE(peer.ok()) << peer.error().message;
  EXPECT_NE(*peer, *old);
  expectWorks(*peer, *b, 1000);
}

TEST_P(EngineOpen, WhoHasEndedIsNotFound) {
  const auto a = make();
  auto b = make();
  const Bytes endpoint = b->endpoint();
  const auto peer = a->open(endpoint, "the dead", soon());
  ASSERT_TRUE(peer.ok());
  b.reset();
  EXPECT_TRUE(eventually([&] { return (*peer)->disconnected.load(); }));
  const auto again = a->open(endpoint, "the dead", Deadline::after(5s));
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.error().code, ErrorCode::kPeerLost) << again.error().message;
  EXPECT_NE(again.error().message.find("the dead"), std::string::npos) << again.error().message;
}

TEST(EngineOpen, ACallEndsWhenItsCallerStops) {
  const auto a = makeEngine("tcp"), b = makeEngine("tcp");
  const test::SilentListener silent;
  const auto stop = StopSignal::make();
  ASSERT_TRUE(stop.ok());
  auto call = std::async(std::launch::async, [&] {
    return a->open(atPort(b->endpoint(), silent.port()), "the silent", Deadline::after(60s),
                   stop->get());
  });
  EXPECT_TRUE(eventually([&] { return silent.isCalled(); }));
  (*stop)->stop();
  ASSERT_EQ(call.wait_for(20s), std::future_status::ready);
  EXPECT_EQ(call.get().error().code, ErrorCode::kAborted);
  EXPECT_TRUE(a->open(b->endpoint(), "other", soon()).ok()) << "one's stop is not another's";
}

TEST_P(EngineOpen, StrangersAreRefused) {
  const auto open = make(), closed = makeEngine(GetParam(), Bytes(32, std::byte{7}));
  for (auto [from, to] : {std::pair(open, closed), std::pair(closed, open)}) {
    const auto peer = from->open(to->endpoint(), "a stranger", soon());
    ASSERT_FALSE(peer.ok());
    EXPECT_EQ(peer.error().code, ErrorCode::kRefused) << peer.error().message;
    EXPECT_EQ(to->counters().opened, 0u);
  }
}

// Without an observer, there are no heartbeats and no liveness thread.
TEST_P(EngineOpen, IdlePeersCostNothing) {
  const auto a = make();
  std::vector<std::shared_ptr<Engine>> others;
  for (int i = 0; i < 10; ++i) {
    others.push_back(make());
    ASSERT_TRUE(a->open(others.back()->endpoint(), "idle", soon()).ok());
  }
  std::atomic<bool> isLater{false};
  a->loop().runAt(Deadline::after(60ms), [&] { isLater = true; });
  EXPECT_TRUE(eventually([&] { return isLater.load(); }));
  EXPECT_FALSE(threadNames().contains("mooncake-live"));
  a->observe([](const auto&, const auto&) {});
  EXPECT_TRUE(eventually([] { return threadNames().contains("mooncake-live"); }));
  a->observe(nullptr);
}

TEST_P(EngineOpen, DataThreadsCarryWhatIsLarge) {
  const auto a = make(3), b = make(2);
  const auto peer = a->open(b->endpoint(), "other", soon());
  ASSERT_TRUE(peer.ok());
  for (int round = 0; round < 5; ++round) {
    expectWorks(*peer, *b, 20 << 20);
    const auto back = b->open(a->endpoint(), "other", soon());
    ASSERT_TRUE(back.ok());
    expectWorks(*back, *a, 20 << 20);
  }
}

INSTANTIATE_TEST_SUITE_P(Wires, EngineOpen, ::testing::Values("inproc", "shm", "tcp"),
                         [](const auto& wire) { return std::string(wire.param); });

class IdleConnections : public ::testing::Test {
 protected:
  void make(std::chrono::milliseconds idleAfter) {
    for (auto* engine : {&a_, &b_}) {
      EngineOptions options{.jobKey = publicKey(),
                            .logName = "engine",
                            .arenaBytes = size_t(1) << 30,
                            .dataThreads = 1,
                            .peersReturn = true,
                            .idleAfter = idleAfter};
      options.env.transports = {"tcp"};
      options.env.hostIp = "127.0.0.1";
      auto made = Engine::create(std::move(options));
      ASSERT_TRUE(made.ok()) << made.error().message;
      *engine = *made;
    }
    auto peer = a_->open(b_->endpoint(), "other", soon());
    ASSERT_TRUE(peer.ok());
    there_ = *peer;
    peer = b_->open(a_->endpoint(), "other", soon());
    ASSERT_TRUE(peer.ok());
    back_ = *peer;
  }
  static void move(Engine& owner, const std::shared_ptr<Peer>& peer, Doorbell& bell, size_t bytes) {
    Bytes there(bytes), back(bytes);
    auto region = owner.regions().add(there.data(), there.size(), kRemoteRead | kRemoteWrite);
    ASSERT_TRUE(region.ok());
    const Bytes data = pattern(bytes, 1);
    Completion completion(&bell);
    ASSERT_TRUE(peer->channel->write({region->remote(), 0, data, &completion}).ok());
    ASSERT_TRUE(eventually([&] { return completion.finished(); }));
    ASSERT_EQ(completion.error.load(), ErrorCode::kOk);
    ASSERT_TRUE(peer->channel->get({region->remote(), 0, back, &completion}).ok());
    ASSERT_TRUE(eventually([&] { return completion.finished(); }));
    ASSERT_EQ(completion.error.load(), ErrorCode::kOk);
    ASSERT_TRUE(back == data);
  }
  bool bothHave(uint64_t connections) const {
    return a_->counters().connections == connections && b_->counters().connections == connections;
  }

  Doorbell bells_[2];  // outlive the channels
  std::shared_ptr<Engine> a_, b_;
  std::shared_ptr<Peer> there_, back_;
};

TEST_F(IdleConnections, EndButForTheFirstAndComeBackAtNeed) {
  make(200ms);
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(eventually([&] {
      move(*b_, there_, bells_[0], 300000);
      return bothHave(3);
    })) << round;
    ASSERT_TRUE(eventually([&] { return bothHave(1); })) << round;
    EXPECT_EQ(a_->counters().collected, 2u * (round + 1)) << "who made them ends them";
    EXPECT_FALSE(there_->disconnected);
    move(*a_, back_, bells_[0], 1000);
  }
  EXPECT_EQ(a_->counters().retries, 0u);
  EXPECT_EQ(b_->counters().retries, 0u);
}

// Both sides begin transfers at all moments of a lane's end.
TEST_F(IdleConnections, NothingIsLostToATransferThatBeginsAsTheyEnd) {
  make(4ms);
  const auto until = Clock::now() + 2s;
  std::vector<std::future<void>> movers;
  for (auto [owner, peer] : {std::pair(b_, there_), std::pair(a_, back_)}) {
    Doorbell& bell = bells_[movers.size()];
    movers.push_back(std::async(std::launch::async, [owner = owner, peer = peer, until, &bell] {
      std::minstd_rand random(1);
      while (Clock::now() < until && !HasFatalFailure()) {
        move(*owner, peer, bell, random() % 2 ? 1000 : 200000);
        std::promise<void> later;
        owner->loop().runAt(Deadline::after(std::chrono::milliseconds(random() % 8)),
                            [&] { later.set_value(); });
        later.get_future().wait();
      }
    }));
  }
  for (auto& mover : movers) mover.wait();
  EXPECT_GT(a_->counters().collected, 20u);
  EXPECT_EQ(a_->counters().retries + b_->counters().retries, 0u) << "a connection broke";
}

TEST_F(IdleConnections, WhatIsKeptOfThoseWhoAreGoneGoes) {
  make(100ms);
  move(*b_, there_, bells_[0], 1000);
  b_.reset();
  ASSERT_TRUE(eventually([&] { return there_->disconnected.load(); }));
  EXPECT_TRUE(eventually([&] { return there_.use_count() == 1; }));
  EXPECT_EQ(a_->counters().collected, 1u);
}

// An engine keeps the addresses of connected peers only, so that it can make their connections
// again. Over the months of its life it meets thousands of peers.
class AddressesKept : public ::testing::Test {
 protected:
  // The endpoint of an engine that has ended.
  static Bytes endpointOfTheDead() { return makeEngine("tcp")->endpoint(); }
  bool eventuallyHas(uint64_t addresses) const {
    return bool(eventually([&] { return engine_->counters().addresses == addresses; }));
  }

  static constexpr int kRounds = 10;
  const std::shared_ptr<Engine> engine_ = makeEngine("tcp");
};

TEST_F(AddressesKept, AreThoseOfConnectedPeers) {
  for (int round = 0; round < kRounds; ++round) {
    auto comes = makeEngine("tcp"), stays = makeEngine("tcp");
    ASSERT_TRUE(engine_->open(comes->endpoint(), "that ends", soon()).ok());
    const auto peer = engine_->open(stays->endpoint(), "that is forgotten", soon());
    ASSERT_TRUE(peer.ok());
    EXPECT_EQ(engine_->counters().addresses, 2u);
    comes.reset();
    EXPECT_TRUE(eventuallyHas(1)) << round;
    ASSERT_TRUE(engine_->forget(*peer, soon()).ok());
    EXPECT_TRUE(eventuallyHas(0)) << round;
  }
}

// A process without which its job went on looks for the members that it knew.
TEST_F(AddressesKept, StayWithPeersThatAreGone) {
  auto ends = makeEngine("tcp"), stays = makeEngine("tcp");
  const Bytes first = ends->endpoint(), second = stays->endpoint();
  const auto gone = engine_->open(first, "that ends", soon());
  const auto forgotten = engine_->open(second, "that is forgotten", soon());
  ASSERT_TRUE(gone.ok());
  ASSERT_TRUE(forgotten.ok());
  EXPECT_EQ(engine_->endpointOf(**gone), first);
  ends.reset();
  ASSERT_TRUE(eventually([&] { return (*gone)->disconnected.load(); }));
  ASSERT_TRUE(engine_->forget(*forgotten, soon()).ok());
  EXPECT_EQ(engine_->endpointOf(**gone), first);
  EXPECT_EQ(engine_->endpointOf(**forgotten), second);
  EXPECT_TRUE(engine_->endpointOf((*gone)->id).empty());
  EXPECT_TRUE(engine_->endpointOf((*forgotten)->id).empty());
}

TEST_F(AddressesKept, AreNotThoseOfPeersThatCannotBeReached) {
  for (int round = 0; round < kRounds; ++round) {
    const Bytes dead = endpointOfTheDead();
    EXPECT_FALSE(engine_->open(dead, "the dead", soon()).ok());
    EXPECT_FALSE(engine_->connect({engine_->endpoint(), dead}, Deadline::after(50ms)).ok());
    EXPECT_EQ(engine_->counters().addresses, 0u) << round;
  }
}

TEST_F(AddressesKept, AreThoseOfRanks) {
  auto other = makeEngine("tcp");
  const std::vector<Bytes> endpoints{engine_->endpoint(), other->endpoint()};
  auto met = std::async(std::launch::async, [&] { return other->connect(endpoints, soon()); });
  ASSERT_TRUE(engine_->connect(endpoints, soon()).ok());
  ASSERT_TRUE(met.get().ok());
  EXPECT_EQ(engine_->counters().addresses, 1u);
  other.reset();
  EXPECT_TRUE(eventuallyHas(0));
  ASSERT_TRUE(engine_->connect(endpoints, soon()).ok()) << "it has been there";
  EXPECT_EQ(engine_->counters().addresses, 0u);
}

// The call goes to a listener that never answers, so it lasts until its deadline.
TEST(EngineForget, DoesNotWaitBeyondItsDeadlineForAnotherThreadsCall) {
  const auto a = makeEngine("tcp");
  auto b = makeEngine("tcp");
  const Bytes endpoint = b->endpoint();
  const auto peer = a->open(endpoint, "the silent", soon());
  ASSERT_TRUE(peer.ok()) << peer.error().message;
  b.reset();
  ASSERT_TRUE(eventually([&] { return (*peer)->disconnected.load(); }));
  const test::SilentListener silent;
  const auto calls = std::async(std::launch::async, [&] {
    const auto again = a->open(atPort(endpoint, silent.port()), "the silent", Deadline::after(3s));
    EXPECT_FALSE(again.ok());
  });
  ASSERT_TRUE(eventually([&] { return a->counters().pending == 1; }));
  const auto began = Clock::now();
  const Status early = a->forget(*peer, Deadline::after(50ms));
  EXPECT_EQ(early.code(), ErrorCode::kTimeout);
  EXPECT_LT(Clock::now() - began, 2s);
  EXPECT_TRUE(a->forget(*peer, soon()).ok()) << "when that call has ended";
}

TEST(EngineDescriptors, WhoHasNoneLeftSaysSoAndRecovers) {
  SKIP_WHERE_CHECKS_NEED_DESCRIPTORS();
  const auto a = makeEngine("tcp"), b = makeEngine("tcp");
  std::vector<int> taken;
  {
    const test::DescriptorLimit low(200);
    for (int fd; (fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) >= 0;) taken.push_back(fd);
    const auto peer = a->open(b->endpoint(), "other", Deadline::after(2s));
    ASSERT_FALSE(peer.ok());
    EXPECT_EQ(peer.error().code, ErrorCode::kExhausted) << peer.error().message;
    EXPECT_NE(peer.error().message.find("ulimit -n"), std::string::npos) << peer.error().message;
    for (const int fd : taken) ::close(fd);
    const auto again = a->open(b->endpoint(), "other", soon());
    EXPECT_TRUE(again.ok()) << again.error().message;
  }
}

}  // namespace
}  // namespace mooncake
