#include "transfer/transfer_engine.h"

#include <atomic>
#include <cstdlib>
#include <functional>
#include <future>
#include <gtest/gtest.h>
#include <string_view>
#include <thread>
#include <vector>

#include "base/failpoint.h"
#include "engine_side.h"
#include "silent_listener.h"
#include "socket_breaker.h"

// The transfer engine without Python: two of them in this process, over TCP.
namespace mooncake::transfer {
namespace {

using mooncake::test::SilentListener;
using mooncake::test::SocketBreaker;
using mooncake::testing::pattern;
using std::chrono_literals::operator""s;

std::shared_ptr<TransferEngine> makeEngine(const char* transport = "tcp") {
  TransferEngineOptions options{.localName = "127.0.0.1", .metadataServer = "P2PHANDSHAKE"};
  options.env.transports = {transport};
  auto made = TransferEngine::open(std::move(options));
  EXPECT_TRUE(made.ok()) << made.error().message;
  return made.ok() ? *made : nullptr;
}

uint64_t addressOf(const Bytes& bytes) { return reinterpret_cast<uint64_t>(bytes.data()); }

// Each call waits at a bell of its own. It may ring after the caller has gone on.
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

bool comesTrue(const std::function<bool()>& condition) {
  const auto deadline = Deadline::after(std::chrono::seconds(20));
  while (!condition()) {
    if (deadline.passed()) return false;
    std::this_thread::yield();
  }
  return true;
}

// ---- connections that break under a transfer

// One writer, and its target, over TCP.
class BrokenTransfer : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(there_->registerMemory(addressOf(target_), kBytes), kGood);
    ASSERT_EQ(here_->registerMemory(addressOf(source_), kBytes), kGood);
    segment_ = here_->openSegment(there_->session());
    ASSERT_NE(segment_, nullptr);
  }
  std::future<Code> write() {
    return std::async(std::launch::async, [this] {
      const TransferRequest requests[] = {
          {Opcode::kWrite, addressOf(source_), segment_, addressOf(target_), kBytes}};
      return here_->transfer(requests);
    });
  }
  static bool isUnderWay(const std::future<Code>& written) {
    return written.wait_for(0s) == std::future_status::timeout;
  }

  static constexpr uint64_t kBytes = 64 << 20;
  const std::shared_ptr<TransferEngine> here_ = makeEngine(), there_ = makeEngine();
  Bytes target_ = Bytes(kBytes), source_ = pattern(kBytes, 1);
  std::shared_ptr<Segment> segment_;
};

// The description of the peer stays valid. A transfer may ask for it anew only once.
TEST_F(BrokenTransfer, ItOutlivesMoreThanOneBreakOfItsConnection) {
  constexpr int kBreaks = 4;
  int outlived = 0;
  const auto deadline = Deadline::after(20s);
  while (outlived < kBreaks && !deadline.passed()) {
    auto written = write();
    for (outlived = 0; outlived < kBreaks && isUnderWay(written); ++outlived) {
      const uint64_t before = here_->counters().retries;
      SocketBreaker::breakAll(SocketBreaker::How::kReset);
      EXPECT_TRUE(comesTrue([&] { return here_->counters().retries > before; }));
    }
    ASSERT_EQ(written.get(), kGood);
  }
  EXPECT_EQ(outlived, kBreaks) << "each write was over too soon";
  EXPECT_TRUE(target_ == source_);
}

// The channel is not made again. The transfer asks the peer anew, and gets another channel.
TEST_F(BrokenTransfer, ItGoesOnOverAnotherChannel) {
  bool wasUnderWay = false;
  const auto deadline = Deadline::after(20s);
  while (!wasUnderWay && !deadline.passed()) {
    const auto peer = segment_->peer(Deadline::after(5s));
    ASSERT_TRUE(peer.ok());
    auto written = write();
    const uint64_t before = here_->counters().opened;
    ASSERT_TRUE(here_->engine().forget(*peer, Deadline::after(5s)).ok());
    wasUnderWay = isUnderWay(written);
    ASSERT_EQ(written.get(), kGood);
    if (wasUnderWay) {
      EXPECT_GT(here_->counters().opened, before);
    }
  }
  EXPECT_TRUE(wasUnderWay) << "each write was over too soon";
  EXPECT_TRUE(target_ == source_);
}

// ---- closing

// Sets an environment variable while this object lives.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Variable() { ::unsetenv(name_); }

 private:
  const char* const name_;
};

TEST(TransferEngineCloses, WithoutWaitingForWhoeverDoesNotAnswer) {
  const Variable patience("MC_HANDSHAKE_CONNECT_TIMEOUT", "60");
  const auto engine = makeEngine();
  const SilentListener silent, other;
  const auto at = [](const SilentListener& one) {
    return "127.0.0.1:" + std::to_string(one.port());
  };
  auto opened = std::async(std::launch::async, [&] {
    Code code = kGood;
    (void)engine->openSegment(at(silent), &code);
    return code;
  });
  auto probed = std::async(std::launch::async, [&] { return engine->probe(at(other)); });
  EXPECT_TRUE(comesTrue([&] { return silent.isCalled() && other.isCalled(); }));
  auto closed = std::async(std::launch::async, [&] { engine->close(); });
  EXPECT_EQ(closed.wait_for(20s), std::future_status::ready);
  EXPECT_EQ(opened.get(), kContext);
  EXPECT_EQ(probed.get(), kContext);
}

// A batch that was accepted ends, whenever the engine closes.
TEST(TransferEngineCloses, NoBatchStaysUnderWayForEver) {
  constexpr size_t kEngines = 100, kThreads = 3, kUnderWay = 4;  // batches of each thread
  const auto there = makeEngine();
  Bytes target(4096), source = pattern(4096, 1);
  ASSERT_EQ(there->registerMemory(addressOf(target), target.size()), kGood);
  for (size_t round = 0; round < kEngines; ++round) {
    const auto here = makeEngine();
    ASSERT_EQ(here->registerMemory(addressOf(source), source.size()), kGood);
    const auto segment = here->openSegment(there->session());
    ASSERT_NE(segment, nullptr);
    std::vector<std::future<std::vector<std::shared_ptr<Batch>>>> callers;
    std::atomic<size_t> submitted{0};
    std::atomic<bool> isClosed{false};
    for (size_t i = 0; i < kThreads; ++i) {
      callers.push_back(std::async(std::launch::async, [&] {
        std::vector<std::shared_ptr<Batch>> taken;
        for (;;) {
          const auto batch = here->allocateBatch(1);
          if (!batch) return taken;
          const TransferRequest requests[] = {
              {Opcode::kWrite, addressOf(source), segment, addressOf(target), source.size()}};
          if (here->submit(batch, requests) != kGood) return taken;
          taken.push_back(batch);
          ++submitted;
          if (taken.size() < kUnderWay) continue;
          const auto& before = taken[taken.size() - kUnderWay];
          while (!before->isOver() && !isClosed) std::this_thread::yield();
        }
      }));
    }
    EXPECT_TRUE(comesTrue([&] { return submitted > round; }));
    here->close();
    isClosed = true;
    for (auto& caller : callers) {
      for (const auto& batch : caller.get())
        ASSERT_TRUE(batch->isOver()) << "batch " << batch->id << " of engine " << round;
    }
  }
}

// ---- peers that are shut out in the middle of a write

std::atomic<bool> holdsWrites{false};
std::atomic<bool> isHeld{false};

// Holds the write at a piece, as if its process were stopped.
void holdWrite(const char* name) {
  if (std::string_view(name) != "write-piece") return;
  while (holdsWrites) {
    isHeld = true;
    std::this_thread::yield();
  }
}

enum class Way { kFenced, kForgotten };

class LateWrite : public ::testing::TestWithParam<Way> {};

TEST_P(LateWrite, ManagedMemoryIsNotGivenAwayBeforeItsEnd) {
  constexpr uint64_t kBytes = ManagedPool::kLeastBytes;
  const auto writer = makeEngine("inproc"), owner = makeEngine("inproc");
  const uint64_t memory = owner->allocateManaged(kBytes);
  ASSERT_NE(memory, 0u);
  Bytes source = pattern(kBytes, 1);
  ASSERT_EQ(writer->registerMemory(addressOf(source), source.size()), kGood);
  const auto segment = writer->openSegment(owner->session());
  ASSERT_NE(segment, nullptr);
  holdsWrites = true;
  observeFailpoints(&holdWrite);
  auto written = std::async(std::launch::async, [&] {
    const TransferRequest requests[] = {
        {Opcode::kWrite, addressOf(source), segment, memory, kBytes}};
    return writer->transfer(requests);
  });
  EXPECT_TRUE(comesTrue([] { return isHeld.load(); }));

  const auto back = owner->openSegment(writer->session());
  ASSERT_NE(back, nullptr);
  const auto peer = back->peer(Deadline::after(std::chrono::seconds(5)));
  ASSERT_TRUE(peer.ok());
  EXPECT_TRUE(owner->engine().lateWriters().empty());  // the peer has not been shut out
  if (GetParam() == Way::kFenced) {
    (*peer)->channel->fence();
  } else {
    ASSERT_TRUE(owner->engine().forget(*peer, Deadline::after(std::chrono::seconds(5))).ok());
  }
  EXPECT_EQ(owner->freeManaged(memory, kBytes), kGood);
  for (int i = 0; i < 100; ++i) EXPECT_NE(owner->allocateManaged(kBytes), memory);

  holdsWrites = false;
  written.wait();
  EXPECT_TRUE(comesTrue([&] { return owner->engine().lateWriters().empty(); }));
  EXPECT_EQ(owner->allocateManaged(kBytes), memory);
  isHeld = false;
}

INSTANTIATE_TEST_SUITE_P(TransferEngine, LateWrite,
                         ::testing::Values(Way::kFenced, Way::kForgotten), [](const auto& way) {
                           return way.param == Way::kFenced ? "fenced" : "forgotten";
                         });

}  // namespace
}  // namespace mooncake::transfer
