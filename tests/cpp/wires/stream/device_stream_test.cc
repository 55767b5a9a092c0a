#include <cstring>
#include <future>
#include <sys/socket.h>
#include <vector>

#include "base/failpoint.h"
#include "device/fake/fake_devices.h"
#include "engine/memory/device_copies.h"
#include "engine_side.h"
#include "wires/stream/stream_connection.h"
#include "wires/stream/wire.h"

// Transfers from and to memory of devices over one connection.
namespace mooncake::testing {
namespace {

constexpr size_t kPiece = wire::kMaxPieceBytes;

// Memory of a device (0 or 1), or of the host (-1). The fake devices' memory can be read and written
// here while no stream uses it.
class Memory {
 public:
  Memory(FakeDevices& devices, int device, size_t bytes) : devices_(devices) {
    if (device < 0) {
      host_.resize(bytes);
      span_ = host_;
      return;
    }
    const auto allocated = devices.allocate(device, bytes);
    EXPECT_TRUE(allocated.ok());
    span_ = *allocated;
    owner_ = {.accelerator = &devices, .device = device};
    clear();
  }
  ~Memory() {
    if (owner_) devices_.free(span_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void fill(ByteView bytes) { std::memcpy(span_.data(), bytes.data(), bytes.size()); }
  void clear() { std::memset(span_.data(), 0, span_.size()); }
  Bytes copy() const { return Bytes(span_.begin(), span_.end()); }
  std::span<std::byte> span() const { return span_; }
  const MemoryOwner& owner() const { return owner_; }
  MemoryRegion region(RegionTable& regions) const {
    auto added =
        regions.add(span_.data(), span_.size(), kRemoteRead | kRemoteWrite | kOfProgram, owner_);
    EXPECT_TRUE(added.ok());
    return std::move(*added);
  }

 private:
  FakeDevices& devices_;
  Bytes host_;
  std::span<std::byte> span_;
  MemoryOwner owner_;
};

// Holds the streams that a device has beside its default one until it is opened.
class Hold {
 public:
  Hold(FakeDevices& devices, int device) {
    auto streams = devices.streams(device);
    EXPECT_GT(streams.size(), 1u) << "no copy has been made on this device";
    for (size_t i = 1; i < streams.size(); ++i) {
      EXPECT_TRUE(devices.enqueue(streams[i], [future = future_] { future.wait(); }).ok());
    }
  }
  ~Hold() { open(); }
  void open() {
    if (!std::exchange(isOpen_, true)) opened_.set_value();
  }

 private:
  std::promise<void> opened_;
  std::shared_future<void> future_ = opened_.get_future().share();
  bool isOpen_ = false;
};

// Counts how often a thread has waited for a copy. Made before the threads.
struct Waits {
  Waits() {
    count = 0;
    observeFailpoints([](const char* name) { count += std::string_view(name) == "await-copy"; });
  }
  static inline std::atomic<int> count{0};
};

struct Outcome {
  explicit Outcome(Doorbell* bell) : completion(bell) {}
  Completion completion;
  bool ended() const { return completion.finished(); }
  ErrorCode code() const { return completion.error.load(); }
};

// The ends of a connection are in this process, and so are their devices.
class DeviceStreamTest : public ::testing::Test {
 protected:
  struct Pair {
    std::shared_ptr<StreamConnection> atA, atB;
    std::atomic<int> ended{0};
  };
  std::unique_ptr<Pair> connect() {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    auto pair = std::make_unique<Pair>();
    pair->atA = start(a_, Fd(ends[0]), pair->ended);
    pair->atB = start(b_, Fd(ends[1]), pair->ended);
    return pair;
  }
  std::shared_ptr<StreamConnection> start(EngineSide& side, Fd socket, std::atomic<int>& ended) {
    return StreamConnection::start(std::move(socket), side.loop(), side.regions(),
                                   {.onMessage = [this](ByteView) { ++messages_; },
                                    .onClosed = [&ended](const Status&) { ++ended; }});
  }
  void TearDown() override { close(*pair_); }
  static void close(Pair& pair) {
    pair.atA->close();
    pair.atB->close();
  }

  Status begin(Outcome& outcome, const Memory& here, const RemoteRegion& there, bool isWrite) {
    if (isWrite) {
      return pair_->atA->write({.region = there,
                                .source = here.span(),
                                .completion = &outcome.completion,
                                .isOfProgram = true,
                                .owner = here.owner()});
    }
    return pair_->atA->get({.region = there,
                            .target = here.span(),
                            .completion = &outcome.completion,
                            .isOfProgram = true,
                            .owner = here.owner()});
  }
  // One transfer, to its end.
  ErrorCode transfer(const Memory& here, const RemoteRegion& there, bool isWrite) {
    Outcome outcome(&bell_);
    const Status begun = begin(outcome, here, there, isWrite);
    EXPECT_TRUE(begun.ok());
    EXPECT_TRUE(eventually([&] { return outcome.ended(); }));
    // The peer told it over the socket. ThreadSanitizer sees only this.
    meetLoops();
    why_ = outcome.completion.why;
    return outcome.code();
  }
  // Makes the connection's streams and buffers for the device at one end.
  void warmUp(int deviceAtA, int deviceAtB, bool isWrite) {
    Memory here(*devices_, deviceAtA, 1), there(*devices_, deviceAtB, 1);
    const MemoryRegion region = there.region(b_.regions());
    ASSERT_EQ(transfer(here, region.remote(), isWrite), ErrorCode::kOk);
  }
  void meetLoops() {
    for (EngineSide* side : {&a_, &b_}) {
      std::promise<void> done;
      side->loop().post([&] { done.set_value(); });
      done.get_future().wait();
    }
  }
  // Lets both loops do what is due.
  void turnLoops() {
    for (int i = 0; i < 20; ++i) meetLoops();
  }

  const Waits waits_;
  Doorbell bell_;
  std::atomic<int> messages_{0};
  std::string why_;
  const std::unique_ptr<FakeDevices> devices_ = makeFakeDevices();
  EngineSide a_, b_;
  std::unique_ptr<Pair> pair_ = connect();
};

struct Ends {
  int here, there;
};
constexpr Ends kAllEnds[] = {{0, -1}, {-1, 0}, {0, 0}, {0, 1}};

TEST_F(DeviceStreamTest, MovesAnySizeBothWays) {
  uint64_t round = 0;
  for (const Ends& ends : kAllEnds) {
    for (const size_t bytes :
         {size_t(1), size_t(100), kPiece - 1, kPiece, kPiece + 1, 9 * kPiece + 12'345}) {
      Memory here(*devices_, ends.here, bytes), there(*devices_, ends.there, bytes);
      const MemoryRegion region = there.region(b_.regions());
      const Bytes written = pattern(bytes, ++round), read = pattern(bytes, ++round);
      here.fill(written);
      ASSERT_EQ(transfer(here, region.remote(), true), ErrorCode::kOk);
      EXPECT_TRUE(there.copy() == written) << bytes << " bytes written";
      there.fill(read);
      ASSERT_EQ(transfer(here, region.remote(), false), ErrorCode::kOk);
      EXPECT_TRUE(here.copy() == read) << bytes << " bytes read";
    }
  }
}

// Two devices and the host at each end, sizes from nothing to a few pieces.
TEST_F(DeviceStreamTest, ManyTransfersAtOnceKeepTheirData) {
  constexpr size_t kTransfers = 300, kMost = 3 * kPiece;
  struct One {
    One(FakeDevices& devices, const Ends& ends, size_t bytes, Doorbell* bell)
        : here(devices, ends.here, bytes), there(devices, ends.there, bytes), outcome(bell) {}
    Memory here, there;
    MemoryRegion region;
    Outcome outcome;
    Bytes data;
  };
  std::vector<std::unique_ptr<One>> all;
  for (size_t i = 0; i < kTransfers; ++i) {
    const Ends ends{int(i % 3) - 1, int(i / 3 % 3) - 1};
    const size_t bytes = 1 + (i * 7919 * 131) % (i % 5 == 0 ? kMost : 4000);
    auto one = std::make_unique<One>(*devices_, ends, bytes, &bell_);
    one->region = one->there.region(b_.regions());
    one->data = pattern(bytes, i);
    (i % 2 == 0 ? one->here : one->there).fill(one->data);
    all.push_back(std::move(one));
  }
  for (size_t i = 0; i < kTransfers; ++i) {
    One& one = *all[i];
    ASSERT_TRUE(begin(one.outcome, one.here, one.region.remote(), i % 2 == 0).ok());
  }
  for (size_t i = 0; i < kTransfers; ++i) {
    One& one = *all[i];
    ASSERT_TRUE(eventually([&] { return one.outcome.ended(); })) << i;
    EXPECT_EQ(one.outcome.code(), ErrorCode::kOk) << i;
    EXPECT_TRUE((i % 2 == 0 ? one.there : one.here).copy() == one.data) << i;
  }
}

// From the second transfer on nothing is allocated: it would fail.
TEST_F(DeviceStreamTest, ATransferAllocatesNothingFromTheDevice) {
  constexpr size_t kBytes = 20 * kPiece;
  Memory here(*devices_, 0, kBytes), there(*devices_, 1, kBytes);
  const MemoryRegion region = there.region(b_.regions());
  for (const bool isWrite : {true, false})
    ASSERT_EQ(transfer(here, region.remote(), isWrite), ErrorCode::kOk);
  for (const char* call : {"allocatePinned", "allocate", "createStream", "createEvent"})
    ASSERT_TRUE(devices_->inject({.call = call, .n = 1, .times = 1000}).ok());
  for (uint64_t round = 0; round < 20; ++round) {
    here.fill(pattern(kBytes, round));
    ASSERT_EQ(transfer(here, region.remote(), round % 2 == 0), ErrorCode::kOk);
  }
}

// ---- failures

TEST_F(DeviceStreamTest, AFailedCallEndsItsTransferAndNoOther) {
  constexpr size_t kBytes = 8 * kPiece;
  for (const Ends& ends : {Ends{0, -1}, Ends{-1, 0}}) {
    Memory here(*devices_, ends.here, kBytes), there(*devices_, ends.there, kBytes);
    const MemoryRegion region = there.region(b_.regions());
    for (const bool isWrite : {true, false}) {
      for (const char* call : {"copy", "record", "hasHappened"}) {
        for (const uint64_t n : {1, 3, 8}) {
          ASSERT_TRUE(devices_->inject({.call = call, .n = n}).ok());
          EXPECT_EQ(transfer(here, region.remote(), isWrite), ErrorCode::kSystem)
              << call << " " << n;
          const bool isOurs = ends.here == 0;
          EXPECT_NE(why_.find(isOurs ? call : "device of the peer"), std::string::npos) << why_;
          const Bytes data = pattern(kBytes, n);
          (isWrite ? here : there).fill(data);
          EXPECT_EQ(transfer(here, region.remote(), isWrite), ErrorCode::kOk);
          EXPECT_TRUE((isWrite ? there : here).copy() == data);
        }
      }
    }
  }
}

TEST_F(DeviceStreamTest, WithoutPinnedMemoryATransferFails) {
  for (const Ends& ends : {Ends{0, -1}, Ends{-1, 0}}) {
    for (const bool isWrite : {true, false}) {
      for (const char* call : {"allocatePinned", "createEvent"}) {
        close(*std::exchange(pair_, connect()));
        Memory here(*devices_, ends.here, 1000), there(*devices_, ends.there, 1000);
        const MemoryRegion region = there.region(b_.regions());
        ASSERT_TRUE(devices_->inject({.call = call}).ok());
        EXPECT_EQ(transfer(here, region.remote(), isWrite), ErrorCode::kSystem) << call;
        EXPECT_EQ(transfer(here, region.remote(), isWrite), ErrorCode::kOk) << call;
      }
    }
  }
}

// The first copy of a device finds its streams.
TEST_F(DeviceStreamTest, WithoutAStreamATransferFails) {
  Memory here(*devices_, 0, 1000), there(*devices_, -1, 1000);
  const MemoryRegion region = there.region(b_.regions());
  ASSERT_TRUE(devices_->inject({.call = "createStream"}).ok());
  EXPECT_EQ(transfer(here, region.remote(), true), ErrorCode::kSystem);
  EXPECT_EQ(transfer(here, region.remote(), true), ErrorCode::kOk);
}

TEST_F(DeviceStreamTest, ALostContextEndsTransfersOfDevicesOnly) {
  Memory device(*devices_, 0, 3 * kPiece), host(*devices_, -1, 3 * kPiece);
  Memory there(*devices_, -1, 3 * kPiece);
  const MemoryRegion region = there.region(b_.regions());
  ASSERT_EQ(transfer(device, region.remote(), true), ErrorCode::kOk);
  Outcome underWay(&bell_);
  Hold hold(*devices_, 0);
  ASSERT_TRUE(begin(underWay, device, region.remote(), true).ok());
  turnLoops();
  EXPECT_FALSE(underWay.ended());
  devices_->loseContext();
  hold.open();
  EXPECT_TRUE(eventually([&] { return underWay.ended(); }));
  EXPECT_EQ(underWay.code(), ErrorCode::kSystem);
  for (const bool isWrite : {true, false}) {
    EXPECT_EQ(transfer(device, region.remote(), isWrite), ErrorCode::kSystem);
    EXPECT_NE(why_.find("context of the device is lost"), std::string::npos) << why_;
    const Bytes data = pattern(3 * kPiece, 1 + isWrite);
    (isWrite ? host : there).fill(data);
    EXPECT_EQ(transfer(host, region.remote(), isWrite), ErrorCode::kOk);
    EXPECT_TRUE((isWrite ? there : host).copy() == data);
  }
}

// ---- copies under way

// Ends a transfer whose copy is held, in one of several ways: the call must not return before.
class HeldCopyTest : public DeviceStreamTest, public ::testing::WithParamInterface<bool> {
 protected:
  static constexpr size_t kBytes = 8 * kPiece;  // more than the buffers hold
  bool isWrite() const { return GetParam(); }

  void begin() {
    warmUp(0, -1, isWrite());
    here_.fill(pattern(kBytes, 1));
    there_.fill(pattern(kBytes, 2));
    hold_.emplace(*devices_, 0);
    ASSERT_TRUE(DeviceStreamTest::begin(outcome_, here_, region_.remote(), isWrite()).ok());
    turnLoops();  // at least one copy is enqueued
    EXPECT_FALSE(outcome_.ended());
  }
  // Nothing touches the memory any more: neither reads nor writes of it are seen later.
  void expectQuiet() {
    here_.fill(pattern(kBytes, 3));
    const Bytes there = there_.copy();
    warmUp(0, -1, isWrite());  // the streams have gone on
    EXPECT_TRUE(here_.copy() == pattern(kBytes, 3));
    if (isWrite()) {
      EXPECT_TRUE(there_.copy() == there);
    }
  }
  void expectToWait(std::function<void()> call) {
    auto returned = std::async(std::launch::async, std::move(call));
    EXPECT_TRUE(eventually([] { return Waits::count > 0; })) << "it does not wait for the copy";
    EXPECT_FALSE(outcome_.ended());
    hold_->open();
    returned.get();
    EXPECT_TRUE(eventually([&] { return outcome_.ended(); }));
    EXPECT_EQ(outcome_.code(), ErrorCode::kAborted);
  }

  Memory here_{*devices_, 0, kBytes}, there_{*devices_, -1, kBytes};
  const MemoryRegion region_ = there_.region(b_.regions());
  Outcome outcome_{&bell_};
  std::optional<Hold> hold_;
};
INSTANTIATE_TEST_SUITE_P(Ways, HeldCopyTest, ::testing::Bool(),
                         [](const auto& way) { return way.param ? "Write" : "Get"; });

TEST_P(HeldCopyTest, CancelWaitsForIt) {
  begin();
  expectToWait([&] { pair_->atA->cancel(&outcome_.completion); });
  expectQuiet();
}

TEST_P(HeldCopyTest, FenceWaitsForIt) {
  begin();
  expectToWait([&] { pair_->atA->fence(); });
}

TEST_P(HeldCopyTest, CloseWaitsForIt) {
  begin();
  expectToWait([&] { pair_->atA->close(); });
}

// The loop does not wait: another connection on it goes on meanwhile.
TEST_P(HeldCopyTest, ABrokenConnectionEndsAfterItAndHoldsUpNoOther) {
  begin();
  pair_->atB->close({ErrorCode::kPeerLost, "the test breaks it"});
  turnLoops();
  EXPECT_EQ(pair_->ended, 0);
  EXPECT_FALSE(outcome_.ended());
  const auto broken = std::exchange(pair_, connect());
  Memory host(*devices_, -1, kBytes), other(*devices_, 1, kBytes);
  EXPECT_EQ(transfer(host, region_.remote(), true), ErrorCode::kOk);
  EXPECT_EQ(transfer(other, region_.remote(), false), ErrorCode::kOk);
  EXPECT_EQ(broken->ended, 0);
  hold_->open();
  EXPECT_TRUE(eventually([&] { return broken->ended == 1; }));
  EXPECT_EQ(outcome_.code(), ErrorCode::kPeerLost);
  close(*broken);
}

// Memory that the peer reads or writes, on a device of its owner.
class HeldOwnerTest : public HeldCopyTest {};
INSTANTIATE_TEST_SUITE_P(Ways, HeldOwnerTest, ::testing::Bool(),
                         [](const auto& way) { return way.param ? "Write" : "Get"; });

TEST_P(HeldOwnerTest, UnregisteringWaitsForIt) {
  warmUp(-1, 1, isWrite());
  Memory here(*devices_, -1, kBytes), there(*devices_, 1, kBytes);
  std::optional<MemoryRegion> region(there.region(b_.regions()));
  Hold hold(*devices_, 1);
  Outcome outcome(&bell_);
  ASSERT_TRUE(DeviceStreamTest::begin(outcome, here, region->remote(), isWrite()).ok());
  turnLoops();
  auto returned = std::async(std::launch::async, [&] { region.reset(); });
  turnLoops();
  EXPECT_EQ(returned.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  hold.open();
  returned.get();
  there.fill(pattern(kBytes, 3));
  EXPECT_TRUE(eventually([&] { return outcome.ended(); }));
  EXPECT_TRUE(there.copy() == pattern(kBytes, 3));
}

TEST_P(HeldOwnerTest, FencingItsPeerWaitsForIt) {
  warmUp(-1, 1, isWrite());
  Memory here(*devices_, -1, kBytes), there(*devices_, 1, kBytes);
  const MemoryRegion region = there.region(b_.regions());
  hold_.emplace(*devices_, 1);
  ASSERT_TRUE(DeviceStreamTest::begin(outcome_, here, region.remote(), isWrite()).ok());
  turnLoops();
  expectToWait([&] { pair_->atB->fence(); });
  there.fill(pattern(kBytes, 3));
  turnLoops();
  EXPECT_TRUE(there.copy() == pattern(kBytes, 3));
}

// Copies are under way from all buffers, so the rest of the write stays in the socket. No other
// connection waits for that.
TEST_F(DeviceStreamTest, ABusyDeviceHoldsUpNoOtherConnection) {
  constexpr size_t kBytes = 40 * kPiece;
  warmUp(-1, 0, true);
  Memory here(*devices_, -1, kBytes), there(*devices_, 0, kBytes);
  const MemoryRegion region = there.region(b_.regions());
  here.fill(pattern(kBytes, 5));
  Hold hold(*devices_, 0);
  Outcome outcome(&bell_);
  ASSERT_TRUE(begin(outcome, here, region.remote(), true).ok());
  turnLoops();
  auto held = std::exchange(pair_, connect());
  Memory host(*devices_, -1, kBytes);
  const MemoryRegion other = host.region(b_.regions());
  EXPECT_EQ(transfer(here, other.remote(), true), ErrorCode::kOk);
  EXPECT_TRUE(host.copy() == pattern(kBytes, 5));
  EXPECT_FALSE(outcome.ended());
  hold.open();
  EXPECT_TRUE(eventually([&] { return outcome.ended(); }));
  EXPECT_EQ(outcome.code(), ErrorCode::kOk);
  EXPECT_TRUE(there.copy() == pattern(kBytes, 5));
  close(*held);
}

// A peer that does not read keeps neither the region nor more than the connection's buffers.
TEST_F(DeviceStreamTest, ASilentPeerDoesNotKeepTheMemory) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
  std::atomic<int> ended{0};
  const auto served = start(b_, Fd(ends[0]), ended);
  const Fd silent(ends[1]);
  Memory there(*devices_, 0, 40 * kPiece);
  MemoryRegion region = there.region(b_.regions());
  const auto get = wire::encode({.kind = wire::Kind::kGet,
                                 .request = 1,
                                 .key = region.remote().key,
                                 .length = there.span().size()});
  ASSERT_EQ(::send(silent.get(), get.data(), get.size(), 0), ssize_t(get.size()));
  std::byte first;
  ASSERT_TRUE(eventually([&] { return ::recv(silent.get(), &first, 1, MSG_PEEK) == 1; }));
  region = MemoryRegion();  // returns
  served->close();
}

// Signals and messages are for the host. A put into memory of a device is refused.
TEST_F(DeviceStreamTest, NoPutGoesToADevice) {
  Memory there(*devices_, 0, 4096);
  const MemoryRegion region = there.region(b_.regions());
  ASSERT_TRUE(pair_->atA->put({region.remote(), 1024, pattern(100, 1), {512, stampOf(1)}}).ok());
  ASSERT_TRUE(pair_->atA->send(bytesOf("behind it")).ok());
  ASSERT_TRUE(eventually([&] { return messages_ == 1; }));
  EXPECT_TRUE(there.copy() == Bytes(4096));
}

}  // namespace
}  // namespace mooncake::testing
