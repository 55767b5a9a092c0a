#include "engine/engine.h"

#include <atomic>
#include <future>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <thread>

#include "descriptor_limit.h"
#include "engine_side.h"

namespace mooncake {
namespace {

using mooncake::testing::eventually;
using std::chrono_literals::operator""s;

constexpr uint64_t kDoor = 7;

Bytes bytesOf(size_t n) { return Bytes(8, std::byte(n)); }

// Two engines of one process that know each other.
class EngineMessages : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    std::vector<Bytes> endpoints;
    for (auto& engine : engines_) {
      EngineOptions options{.logName = "engine", .arenaBytes = size_t(1) << 30};
      options.env.transports = {GetParam()};
      options.jobKey = Bytes(32, std::byte{7});
      auto made = Engine::create(std::move(options));
      ASSERT_TRUE(made.ok()) << made.error().message;
      engine = *made;
      endpoints.push_back(engine->endpoint());
    }
    const auto deadline = Deadline::after(30s);
    auto other = std::async(std::launch::async, [&] { return b().connect(endpoints, deadline); });
    auto mine = a().connect(endpoints, deadline);
    auto theirs = other.get();
    ASSERT_TRUE(mine.ok() && theirs.ok());
    toB_ = (*mine)[1];
    toA_ = (*theirs)[0];
  }

  Engine& a() { return *engines_[0]; }
  Engine& b() { return *engines_[1]; }
  // Waits until all messages that a has sent to b have arrived, for any topic.
  void awaitSent() {
    constexpr uint64_t kBehind = kDoor + 1;
    std::atomic<bool> isThere{false};
    b().openTopic(kBehind, [&](const EngineId&, ByteView) { isThere = true; });
    ASSERT_TRUE(a().send(*toB_, kBehind, bytesOf(1)).ok());
    EXPECT_TRUE(eventually([&] { return isThere.load(); })) << "no topic is in another's way";
    b().closeTopic(kBehind);
  }

  std::shared_ptr<Engine> engines_[2];
  std::shared_ptr<Peer> toB_, toA_;
};

TEST_P(EngineMessages, EarlyOnesComeFirstAndAllInOrder) {
  constexpr size_t kCount = 2 * MessageRouter::kMostEarly;
  for (size_t i = 0; i < kCount / 2; ++i) ASSERT_TRUE(a().send(*toB_, kDoor, bytesOf(i)).ok());
  awaitSent();
  std::atomic<size_t> received{0}, wrong{0};
  b().openTopic(kDoor, [&](const EngineId& from, ByteView message) {
    wrong += from != a().id() || Bytes(message.begin(), message.end()) != bytesOf(received);
    ++received;
  });
  for (size_t i = kCount / 2; i < kCount; ++i)
    ASSERT_TRUE(a().send(b().id(), kDoor, bytesOf(i)).ok());
  EXPECT_TRUE(eventually([&] { return received == kCount; })) << received;
  EXPECT_EQ(wrong, 0u);
  b().closeTopic(kDoor);
}

TEST_P(EngineMessages, EarlyOnesAreBounded) {
  for (size_t i = 0; i < 1500; ++i) ASSERT_TRUE(a().send(*toB_, kDoor, bytesOf(i)).ok());
  awaitSent();
  a().leave();
  EXPECT_TRUE(eventually([&] { return toA_->disconnected.load(); }));
  std::atomic<size_t> received{0};
  b().openTopic(kDoor, [&](const EngineId&, ByteView) { ++received; });
  EXPECT_TRUE(eventually([&] { return received > 0; }));
  EXPECT_LE(received, MessageRouter::kMostEarly);
  b().closeTopic(kDoor);
}

TEST_P(EngineMessages, TheNewestOfTheEarlyOnesAreKept) {
  constexpr size_t kCount = MessageRouter::kMostEarly + 500;
  for (size_t i = 0; i < kCount; ++i)
    ASSERT_TRUE(a().send(*toB_, kDoor, ByteWriter().put(uint64_t(i)).take()).ok());
  awaitSent();
  std::vector<uint64_t> received;
  std::atomic<bool> last{false};
  b().openTopic(kDoor, [&](const EngineId&, ByteView message) {
    ByteReader in(message);
    received.push_back(in.get<uint64_t>());
    last = received.back() == kCount - 1;
  });
  EXPECT_TRUE(eventually([&] { return last.load(); }));
  b().closeTopic(kDoor);
  ASSERT_EQ(received.size(), MessageRouter::kMostEarly);
  EXPECT_EQ(received.front(), kCount - MessageRouter::kMostEarly);
}

TEST_P(EngineMessages, AHandlerMaySendAndMayStopItself) {
  std::atomic<int> atA{0}, atB{0};
  a().openTopic(kDoor, [&](const EngineId& from, ByteView message) {
    if (++atA < 50) {
      EXPECT_TRUE(a().send(from, kDoor, message).ok());
    } else {
      a().closeTopic(kDoor);
    }
  });
  b().openTopic(kDoor, [&](const EngineId& from, ByteView message) {
    ++atB;
    EXPECT_TRUE(b().send(from, kDoor, message).ok());
  });
  ASSERT_TRUE(a().send(*toB_, kDoor, bytesOf(1)).ok());
  EXPECT_TRUE(eventually([&] { return atA == 50; }));
  ASSERT_TRUE(b().send(*toA_, kDoor, bytesOf(1)).ok());  // dropped
  b().closeTopic(kDoor);
  a().closeTopic(kDoor);
  EXPECT_EQ(atA, 50);
}

TEST_P(EngineMessages, NothingIsHandledAfterTheHandlerIsTakenAway) {
  std::atomic<bool> ends{false};
  std::thread sender([&] {
    while (!ends) {
      // kExhausted while the loop is behind
      (void)a().send(*toB_, kDoor, Bytes(1000));
      std::this_thread::yield();
    }
  });
  for (int i = 0; i < 50; ++i) {
    auto state = std::make_unique<std::atomic<int>>(0);
    b().openTopic(kDoor, [counted = state.get()](const EngineId&, ByteView) { ++*counted; });
    if (i % 2 == 0) {
      EXPECT_TRUE(eventually([&] { return *state > 0; }));
    }
    b().closeTopic(kDoor);
    state.reset();  // ASan finds a handler that runs later
  }
  // An engine that is destroyed also removes its handler, while the peer still sends.
  auto last = std::make_unique<std::atomic<int>>(0);
  b().openTopic(kDoor, [counted = last.get()](const EngineId&, ByteView) { ++*counted; });
  engines_[1].reset();
  last.reset();
  ends = true;
  sender.join();
}

TEST_P(EngineMessages, ThoseOfManyThreadsArriveEachInItsOrder) {
  constexpr size_t kThreads = 4, kEach = 500;
  std::atomic<size_t> received{0}, wrong{0};
  size_t next[kThreads] = {};
  b().openTopic(kDoor, [&](const EngineId&, ByteView message) {
    const auto* words = reinterpret_cast<const std::byte*>(message.data());
    const size_t thread = size_t(words[0]), number = size_t(words[1]) << 8 | size_t(words[2]);
    wrong += thread >= kThreads || next[thread]++ != number;
    ++received;
  });
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < kEach; ++i) {
        EXPECT_TRUE(
            a().send(*toB_, kDoor, Bytes{std::byte(t), std::byte(i >> 8), std::byte(i & 255)})
                .ok());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_TRUE(eventually([&] { return received == kThreads * kEach; })) << received;
  EXPECT_EQ(wrong, 0u);
  b().closeTopic(kDoor);
}

TEST_P(EngineMessages, WhatWasSentComesBeforeTheGoodbye) {
  std::atomic<int> received{0};
  b().openTopic(kDoor, [&](const EngineId&, ByteView) {
    EXPECT_FALSE(toA_->disconnected);
    ++received;
  });
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(a().send(*toB_, kDoor, bytesOf(i)).ok());
  a().leave();
  EXPECT_TRUE(eventually([&] { return toA_->disconnected.load(); }));
  EXPECT_EQ(received, 100);
  EXPECT_EQ(b().send(*toA_, kDoor, bytesOf(1)).code(), ErrorCode::kPeerLost);
  b().closeTopic(kDoor);
}

TEST_P(EngineMessages, AGoodbyeSaysHowItsSenderEnds) {
  const bool isFailure = GetParam() == std::string("tcp");
  const auto how = isFailure ? Farewell::How::kFailed : Farewell::How::kEnded;
  std::vector<Evidence::Kind> told;
  b().observe([&](const auto&, const Evidence& evidence) { told.push_back(evidence.kind); });
  a().leave({how, "a bug"});
  a().leave();  // the first one counts
  ASSERT_TRUE(eventually([&] { return toA_->disconnected.load(); }));
  const auto expected = isFailure ? Evidence::Kind::kFailed : Evidence::Kind::kEnded;
  EXPECT_EQ(toA_->evidence.kind, expected);
  if (isFailure) {
    EXPECT_EQ(toA_->evidence.detail, "a bug");
  }
  b().observe(nullptr);
  EXPECT_EQ(told, std::vector{expected});
}

TEST_P(EngineMessages, AFarewellThatDoesNotDecodeIsDropped) {
  constexpr uint64_t kFarewells = 2;
  for (const Bytes& wrong : {bytesOf(1), ByteWriter().put(uint8_t(1)).put(uint8_t(9)).take(),
                             ByteWriter().put(uint8_t(1)).put(uint8_t(3)).put(~0U).take()})
    ASSERT_TRUE(a().send(*toB_, kFarewells, wrong).ok());
  a().leave();
  ASSERT_TRUE(eventually([&] { return toA_->disconnected.load(); }));
  EXPECT_TRUE(toA_->evidence.isGoodbye());
}

TEST_P(EngineMessages, WhatCannotBeSentIsRefused) {
  EXPECT_EQ(a().send(*toB_, kDoor, {}).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(a().send(*toB_, kDoor, Bytes(MessageRouter::kMostBytes + 1)).code(),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(a().send(a().id(), kDoor, bytesOf(1)).code(), ErrorCode::kInvalidArgument)
      << "ourselves";
}

INSTANTIATE_TEST_SUITE_P(Wires, EngineMessages, ::testing::Values("inproc", "shm", "tcp"),
                         [](const auto& wire) { return std::string(wire.param); });

TEST(EngineDescriptors, AreEnoughOrItSaysHowManyAreNeeded) {
  rlimit now{};
  EngineOptions options{.logName = "engine", .arenaBytes = size_t(1) << 30};
  options.jobKey = Bytes(32, std::byte{7});
  const test::DescriptorLimit low(100);
  const auto engine = Engine::create(std::move(options));
  ASSERT_TRUE(engine.ok());
  ::getrlimit(RLIMIT_NOFILE, &now);
  EXPECT_EQ(now.rlim_cur, now.rlim_max) << "raised as far as it goes";

  const test::DescriptorLimit lower(50);
  std::vector<Bytes> endpoints{(*engine)->endpoint()};
  for (uint64_t i = 1; i <= 100; ++i)
    endpoints.push_back(ByteWriter().put(i).put(i).put(uint8_t(0)).take());
  const auto peers = (*engine)->connect(endpoints, Deadline::after(60s));
  ASSERT_FALSE(peers.ok());
  EXPECT_EQ(peers.error().code, ErrorCode::kExhausted);
  for (const char* said : {"connecting to 100 more ranks takes 100 file descriptors",
                           "this process may have ", "hard limit ", "ulimit -n"}) {
    EXPECT_NE(peers.error().message.find(said), std::string::npos) << peers.error().message;
  }
}

}  // namespace
}  // namespace mooncake
