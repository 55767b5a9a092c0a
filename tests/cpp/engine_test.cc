#include "engine/engine.h"

#include <atomic>
#include <future>
#include <gtest/gtest.h>
#include <thread>

namespace mooncake {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

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
  static bool eventually(const std::function<bool()>& condition) {
    for (int i = 0; i < 10000 && !condition(); ++i) std::this_thread::sleep_for(1ms);
    return condition();
  }

  std::shared_ptr<Engine> engines_[2];
  std::shared_ptr<Peer> toB_, toA_;
};

TEST_P(EngineMessages, EarlyOnesComeFirstAndAllInOrder) {
  constexpr size_t kCount = 200;
  for (size_t i = 0; i < kCount / 2; ++i) ASSERT_TRUE(a().send(toB_, bytesOf(i)).ok());
  std::this_thread::sleep_for(20ms);  // most are there before anybody asks for them
  std::atomic<size_t> received{0}, wrong{0};
  b().receiveMessages([&](const EngineId& from, ByteView message) {
    wrong += from != a().id() || Bytes(message.begin(), message.end()) != bytesOf(received);
    ++received;
  });
  for (size_t i = kCount / 2; i < kCount; ++i) ASSERT_TRUE(a().send(b().id(), bytesOf(i)).ok());
  EXPECT_TRUE(eventually([&] { return received == kCount; })) << received;
  EXPECT_EQ(wrong, 0u);
  b().receiveMessages(nullptr);
}

TEST_P(EngineMessages, EarlyOnesAreBounded) {
  for (size_t i = 0; i < 1500; ++i) ASSERT_TRUE(a().send(toB_, bytesOf(i)).ok());
  ASSERT_TRUE(a().send(toB_, bytesOf(255)).ok());
  std::this_thread::sleep_for(200ms);  // what still waits to be sent goes with the channel
  a().leave();
  EXPECT_TRUE(eventually([&] { return toA_->ended.load(); }));
  size_t received = 0;
  b().receiveMessages([&](const EngineId&, ByteView) { ++received; });
  EXPECT_LE(received, 1024u);
  EXPECT_GT(received, 0u);
  b().receiveMessages(nullptr);
}

TEST_P(EngineMessages, AHandlerMaySendAndMayStopItself) {
  std::atomic<int> atA{0}, atB{0};
  a().receiveMessages([&](const EngineId& from, ByteView message) {
    if (++atA < 50) {
      EXPECT_TRUE(a().send(from, message).ok());
    } else {
      a().receiveMessages(nullptr);
    }
  });
  b().receiveMessages([&](const EngineId& from, ByteView message) {
    ++atB;
    EXPECT_TRUE(b().send(from, message).ok());
  });
  ASSERT_TRUE(a().send(toB_, bytesOf(1)).ok());
  EXPECT_TRUE(eventually([&] { return atA == 50; }));
  ASSERT_TRUE(b().send(toA_, bytesOf(1)).ok());  // dropped
  b().receiveMessages(nullptr);
  a().receiveMessages(nullptr);
  EXPECT_EQ(atA, 50);
}

TEST_P(EngineMessages, NothingIsHandledAfterTheHandlerIsTakenAway) {
  std::atomic<bool> ends{false};
  std::thread sender([&] {
    while (!ends) {
      // kExhausted while the loop is behind
      (void)a().send(toB_, Bytes(1000));
      std::this_thread::yield();
    }
  });
  for (int i = 0; i < 50; ++i) {
    auto state = std::make_unique<std::atomic<int>>(0);
    b().receiveMessages([counted = state.get()](const EngineId&, ByteView) { ++*counted; });
    if (i % 2 == 0) std::this_thread::sleep_for(1ms);
    b().receiveMessages(nullptr);
    state.reset();  // ASAN sees who comes later
  }
  // And an engine that goes takes its handler along, whoever still sends.
  auto last = std::make_unique<std::atomic<int>>(0);
  b().receiveMessages([counted = last.get()](const EngineId&, ByteView) { ++*counted; });
  engines_[1].reset();
  last.reset();
  ends = true;
  sender.join();
}

TEST_P(EngineMessages, ThoseOfManyThreadsArriveEachInItsOrder) {
  constexpr size_t kThreads = 4, kEach = 500;
  std::atomic<size_t> received{0}, wrong{0};
  size_t next[kThreads] = {};
  b().receiveMessages([&](const EngineId&, ByteView message) {
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
            a().send(toB_, Bytes{std::byte(t), std::byte(i >> 8), std::byte(i & 255)}).ok());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_TRUE(eventually([&] { return received == kThreads * kEach; })) << received;
  EXPECT_EQ(wrong, 0u);
  b().receiveMessages(nullptr);
}

TEST_P(EngineMessages, WhatWasSentComesBeforeTheGoodbye) {
  std::atomic<int> received{0};
  b().receiveMessages([&](const EngineId&, ByteView) {
    EXPECT_FALSE(toA_->ended);
    ++received;
  });
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(a().send(toB_, bytesOf(i)).ok());
  a().leave();
  EXPECT_TRUE(eventually([&] { return toA_->ended.load(); }));
  EXPECT_EQ(received, 100);
  EXPECT_EQ(b().send(toA_, bytesOf(1)).code(), ErrorCode::kPeerLost);
  b().receiveMessages(nullptr);
}

TEST_P(EngineMessages, WhatCannotBeSentIsRefused) {
  EXPECT_EQ(a().send(toB_, {}).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(a().send(toB_, Bytes((64 << 10) + 1)).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(a().send(a().id(), bytesOf(1)).code(), ErrorCode::kInvalidArgument) << "ourselves";
}

INSTANTIATE_TEST_SUITE_P(Wires, EngineMessages, ::testing::Values("inproc", "shm", "tcp"),
                         [](const auto& wire) { return std::string(wire.param); });

}  // namespace
}  // namespace mooncake
