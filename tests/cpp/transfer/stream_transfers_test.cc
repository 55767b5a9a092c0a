#include "transfer/stream_transfers.h"

#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <gtest/gtest.h>
#include <memory>
#include <string_view>
#include <thread>
#include <vector>

#include "base/failpoint.h"
#include "device/fake/fake_devices.h"
#include "device/stream_queues.h"
#include "engine_side.h"
#include "transfer/transfer_engine.h"

// Transfers in the order of a stream, between two engines of this process.
namespace mooncake::transfer {
namespace {

using mooncake::testing::eventually;
using mooncake::testing::pattern;

constexpr size_t kBytes = 700'001;

class StreamTransfersTest : public ::testing::Test {
 protected:
  static std::shared_ptr<TransferEngine> makeEngine() {
    TransferEngineOptions options{.localName = "127.0.0.1", .metadataServer = "P2PHANDSHAKE"};
    options.env.transports = {"tcp"};
    auto made = TransferEngine::open(std::move(options));
    EXPECT_TRUE(made.ok());
    return made.ok() ? *made : nullptr;
  }
  void SetUp() override {
    ASSERT_EQ(here_->registerMemory(uint64_t(mine_.data()), kBytes), kGood);
    ASSERT_EQ(there_->registerMemory(uint64_t(theirs_.data()), kBytes), kGood);
    segment_ = here_->openSegment(there_->session());
    ASSERT_NE(segment_, nullptr);
  }
  void TearDown() override {
    gate_.open();
    here_->close();
    (void)fake_.synchronize(stream_);
    fake_.free(mine_);
  }
  // Returns a stream that does not share its hardware queue with the engine's copies. All tests have
  // it, because it keeps the queue.
  static DeviceStream besideCopies() {
    static const DeviceStream found = [] {
      FakeDevices& fake = fakeDevices();
      for (;;) {
        const DeviceStream made = *fake.createStream(1);
        if (*(*fake.streamQueues(1))->reserve(made)) return made;
        fake.destroyStream(made);
      }
    }();
    return found;
  }
  // Holds the stream until open().
  struct Gate {
    std::promise<void> opened;
    bool isOpen = false;
    void open() {
      if (!std::exchange(isOpen, true)) opened.set_value();
    }
  };
  void hold() {
    const auto opened = gate_.opened.get_future().share();
    ASSERT_TRUE(fake_.enqueue(stream_, [opened] { opened.wait(); }).ok());
  }
  void fillLater(const Bytes& bytes) {
    ASSERT_TRUE(
        fake_.enqueue(stream_, [this, bytes] { std::memcpy(mine_.data(), bytes.data(), kBytes); })
            .ok());
  }
  Status transfer(Opcode opcode, uint64_t remote) {
    return here_->transferOnStream(stream_.handle,
                                   {{opcode, uint64_t(mine_.data()), segment_, remote, kBytes}});
  }
  Status transfer(Opcode opcode) { return transfer(opcode, uint64_t(theirs_.data())); }

  // Begins a transfer whose call the driver blocks until the stream is idle, or isGivenUp_.
  std::future<Status> transferInDriver() {
    const auto blocked = std::make_shared<std::promise<void>>();
    const auto untilIdle = [this, blocked] {
      blocked->set_value();
      while (!isGivenUp_ && !fake_.isIdle(stream_)) std::this_thread::yield();
    };
    EXPECT_TRUE(fake_.inject({.call = "writeWord", .block = untilIdle}).ok());
    auto begun = std::async(std::launch::async, [this] { return transfer(Opcode::kWrite); });
    blocked->get_future().wait();
    return begun;
  }

  FakeDevices& fake_ = fakeDevices();
  const DeviceStream stream_ = besideCopies();
  const std::span<std::byte> mine_ = *fake_.allocate(1, kBytes);
  Bytes theirs_ = Bytes(kBytes);
  const std::shared_ptr<TransferEngine> here_ = makeEngine(), there_ = makeEngine();
  std::shared_ptr<Segment> segment_;
  Gate gate_;
  std::atomic<bool> isGivenUp_ = false;
};

TEST_F(StreamTransfersTest, TheyHappenInTheOrderOfTheStream) {
  constexpr uint64_t kRounds = 20;
  hold();
  std::vector<Bytes> read(kRounds, Bytes(kBytes));
  for (uint64_t round = 0; round < kRounds; ++round) {
    fillLater(pattern(kBytes, round));
    ASSERT_TRUE(transfer(Opcode::kWrite).ok());
    fillLater(Bytes(kBytes));
    ASSERT_TRUE(transfer(Opcode::kRead).ok());
    ASSERT_TRUE(fake_
                    .enqueue(stream_,
                             [this, &into = read[round]] {
                               std::memcpy(into.data(), mine_.data(), kBytes);
                             })
                    .ok());
  }
  EXPECT_TRUE(theirs_ == Bytes(kBytes)) << "a write did not wait for its stream";
  gate_.open();
  ASSERT_TRUE(fake_.synchronize(stream_).ok());
  for (uint64_t round = 0; round < kRounds; ++round)
    EXPECT_TRUE(read[round] == pattern(kBytes, round)) << round;
}

TEST_F(StreamTransfersTest, AFailureIsToldOnceAndTheStreamGoesOn) {
  ASSERT_TRUE(transfer(Opcode::kWrite, 4096).ok());  // the peer has no such memory
  ASSERT_TRUE(fake_.synchronize(stream_).ok());
  fillLater(pattern(kBytes, 1));
  const Status told = transfer(Opcode::kWrite);
  EXPECT_EQ(told.code(), ErrorCode::kAborted);
  ASSERT_TRUE(transfer(Opcode::kWrite).ok());
  ASSERT_TRUE(fake_.synchronize(stream_).ok());
  EXPECT_TRUE(theirs_ == pattern(kBytes, 1));
}

TEST_F(StreamTransfersTest, MemoryThatIsUnregisteredMeanwhileIsNotRead) {
  hold();
  ASSERT_TRUE(transfer(Opcode::kWrite).ok());
  ASSERT_EQ(here_->unregisterMemory(uint64_t(mine_.data())), kGood);
  gate_.open();
  ASSERT_TRUE(fake_.synchronize(stream_).ok());
  EXPECT_TRUE(theirs_ == Bytes(kBytes));
  EXPECT_NE(transfer(Opcode::kWrite).code(), ErrorCode::kOk);
}

TEST_F(StreamTransfersTest, AnEngineThatClosesLetsTheStreamGoOn) {
  hold();
  ASSERT_TRUE(transfer(Opcode::kWrite).ok());
  here_->close();
  gate_.open();
  ASSERT_TRUE(fake_.synchronize(stream_).ok());
  EXPECT_TRUE(theirs_ == Bytes(kBytes));
  EXPECT_EQ(transfer(Opcode::kWrite).code(), ErrorCode::kAborted);
}

TEST_F(StreamTransfersTest, CallsThatCannotBeOrderedAreRefused) {
  Bytes host(kBytes);
  ASSERT_EQ(here_->registerMemory(uint64_t(host.data()), kBytes), kGood);
  const auto ofHost = here_->transferOnStream(
      stream_.handle,
      {{Opcode::kWrite, uint64_t(host.data()), segment_, uint64_t(theirs_.data()), kBytes}});
  EXPECT_EQ(ofHost.code(), ErrorCode::kInvalidArgument);
  ASSERT_TRUE(fake_.beginCapture(stream_).ok());
  EXPECT_EQ(transfer(Opcode::kWrite).code(), ErrorCode::kUnsupported);
  ASSERT_TRUE(fake_.endCapture(stream_).ok());
  for (const char* call : {"writeWord", "awaitWord", "isCapturing"}) {
    ASSERT_TRUE(fake_.inject({.call = call}).ok());
    EXPECT_EQ(transfer(Opcode::kWrite).code(), ErrorCode::kSystem) << call;
  }
  ASSERT_TRUE(transfer(Opcode::kWrite).ok());
  EXPECT_TRUE(fake_.synchronize(stream_).ok());
}

// There are 256 pairs of words.
TEST_F(StreamTransfersTest, TheirNumberHasABound) {
  hold();
  for (int i = 0; i < 256; ++i) ASSERT_TRUE(transfer(Opcode::kWrite).ok()) << i;
  EXPECT_EQ(transfer(Opcode::kWrite).code(), ErrorCode::kExhausted);
  gate_.open();
  ASSERT_TRUE(fake_.synchronize(stream_).ok());
  EXPECT_TRUE(eventually([&] { return transfer(Opcode::kWrite).ok(); }));
}

// The driver blocks a call until the stream has passed the transfer before it.
TEST_F(StreamTransfersTest, ACallInTheDriverHoldsUpNoTransfer) {
  hold();
  ASSERT_TRUE(transfer(Opcode::kWrite).ok());
  auto second = transferInDriver();
  gate_.open();
  const bool isOver = second.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
  isGivenUp_ = true;
  EXPECT_TRUE(isOver) << "the first transfer waits for the second call";
  EXPECT_TRUE(second.get().ok());
  EXPECT_TRUE(fake_.synchronize(stream_).ok());
}

TEST_F(StreamTransfersTest, AnEngineThatClosesReleasesACallInTheDriver) {
  hold();
  ASSERT_TRUE(transfer(Opcode::kWrite).ok());
  auto second = transferInDriver();
  auto closes = std::async(std::launch::async, [&] { here_->close(); });
  gate_.open();
  const bool isClosed = closes.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
  isGivenUp_ = true;
  EXPECT_TRUE(isClosed);
  (void)second.get();
  EXPECT_TRUE(fake_.synchronize(stream_).ok());
}

// The stream comes to the first transfer when no worker is left. The second call leaves the driver
// once the stream has passed that transfer.
TEST_F(StreamTransfersTest, ATransferThatBeginsAfterTheWorkersHoldsUpNoEnd) {
  hold();
  ASSERT_TRUE(transfer(Opcode::kWrite).ok());
  auto second = transferInDriver();
  static std::function<void()> atFailpoint;
  atFailpoint = [this] {
    gate_.open();
    EXPECT_TRUE(eventually([&] {
      const auto begun = here_->batch(1);
      return begun && begun->submitted != 0;
    }));
  };
  observeFailpoints([](const char* name) {
    if (std::string_view(name) == "workers-ended") atFailpoint();
  });
  auto closes = std::async(std::launch::async, [&] { here_->close(); });
  const bool isClosed = closes.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
  isGivenUp_ = true;
  EXPECT_TRUE(isClosed);
  closes.wait();
  observeFailpoints([](const char*) {});
  (void)second.get();
  EXPECT_TRUE(fake_.synchronize(stream_).ok());
}

}  // namespace
}  // namespace mooncake::transfer
