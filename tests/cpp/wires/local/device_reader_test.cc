#include "wires/local/device_reader.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <gtest/gtest.h>
#include <thread>
#include <unistd.h>

#include "device/kernel_launch.h"
#include "device/peer_memory.h"
#include "engine/memory/descriptor_offers.h"
#include "engine_side.h"

namespace mooncake::testing {
namespace {

// A device with the process's own memory. Its copies are done when the test lets them.
class PatientDevice final : public Accelerator {
 public:
  std::atomic<bool> isOpen{true};  // copies happen
  std::atomic<int> imports{0}, closes{0};
  Status importResult, copyResult;
  size_t bytesBehind = 0;  // that the exported allocation has less than the region

  const char* name() const override { return "patient"; }
  int deviceCount() const override { return 1; }
  Result<DeviceStream> createStream(int device, StreamPriority) override {
    return DeviceStream{device, this};
  }
  void destroyStream(DeviceStream) override {}
  Status synchronize(DeviceStream) override { return {}; }
  Result<std::unique_ptr<DeviceEvent>> createEvent(int) override {
    return std::unique_ptr<DeviceEvent>(new Event(*this));
  }
  Status copy(DeviceStream, void* to, const void* from, size_t bytes) override {
    if (!copyResult.ok()) return copyResult;
    std::lock_guard lock(mutex_);
    copies_.push_back({to, from, bytes});
    return {};
  }
  Result<ExportedMemory> exportMemory(const void* address) override {
    return ExportedMemory{.handle = std::string(64, 'h'),
                          .allocation = uint64_t(reinterpret_cast<uintptr_t>(address)),
                          .offset = 16,
                          .bytes = kRegionBytes - bytesBehind};
  }
  Result<void*> importMemory(const ExportedMemory& memory, int) override {
    ++imports;
    if (!importResult.ok()) return importResult.error();
    EXPECT_EQ(memory.offset, 0u) << "the whole allocation is mapped";
    EXPECT_EQ(memory.bytes, kRegionBytes + 16);
    return reinterpret_cast<void*>(memory.allocation - 16);
  }
  Status closeMemory(void*) override {
    ++closes;
    return {};
  }

  Result<std::string> describe(int) override { return none(); }
  Result<MemoryPlace> placeOf(const void*) override { return none(); }
  Result<std::span<std::byte>> allocatePinned(size_t) override { return none(); }
  void freePinned(std::span<std::byte>) override {}
  bool hasStreamWords(int) const override { return false; }
  Status writeWord(DeviceStream, StreamWord*, uint32_t) override { return none(); }
  Status awaitWord(DeviceStream, StreamWord*, uint32_t) override { return none(); }
  CaptureMode exchangeCaptureMode(CaptureMode) override { return CaptureMode::kGlobal; }
  Result<bool> isCapturing(DeviceStream) override { return none(); }
  Status prepareKernels(int) override { return none(); }
  Result<KernelRoom> roomFor(const KernelLaunch&, int) override { return none(); }
  Status launch(DeviceStream, const KernelLaunch&) override { return none(); }
  bool ordersCardWrites(int) const override { return true; }
  PeerMemory* peerMemory() override { return &shared; }

  // Of memory that is offered. A descriptor stands for `offered`.
  class Shared final : public PeerMemory {
   public:
    std::span<std::byte> offered;
    std::atomic<int> maps{0}, unmaps{0};
    Status mapResult;

    Status checkSharing(int) override { return none(); }
    Result<Allocation> allocateShared(int, size_t) override { return none(); }
    Result<std::span<std::byte>> mapShared(const Fd&, size_t bytes, int) override {
      ++maps;
      EXPECT_EQ(bytes, offered.size());
      if (!mapResult.ok()) return mapResult.error();
      return offered;
    }
    Status unmapShared(std::span<std::byte>) override {
      ++unmaps;
      return {};
    }
    Result<std::span<std::byte>> mapForHost(std::span<std::byte>) override { return none(); }
    void unmapForHost(std::span<std::byte>) override {}
    Result<bool> canAccessPeer(int, int) override { return none(); }
  } shared;

  static constexpr size_t kRegionBytes = 4096;

 private:
  class Event final : public DeviceEvent {
   public:
    explicit Event(PatientDevice& device) : device_(device) {}
    Status record(DeviceStream) override { return {}; }
    Status block(DeviceStream) override { return none(); }
    Result<bool> hasHappened() override {
      if (!device_.isOpen) return false;
      std::lock_guard lock(device_.mutex_);
      for (const auto& copy : device_.copies_) std::memcpy(copy.to, copy.from, copy.bytes);
      device_.copies_.clear();
      return true;
    }

   private:
    PatientDevice& device_;
  };
  struct Copy {
    void* to;
    const void* from;
    size_t bytes;
  };
  static Error none() { return {ErrorCode::kUnsupported, "not in this test"}; }

  std::mutex mutex_;
  std::vector<Copy> copies_;
};

class DeviceReaderTest : public ::testing::Test {
 protected:
  static constexpr size_t kBytes = PatientDevice::kRegionBytes;

  void SetUp() override {
    loop_ = std::move(*EventLoop::start("test"));
    arena_ = std::move(*Arena::create(64 << 20));
    const uint64_t mirror = *regions_.mirrorIn(*arena_);
    const uint64_t exports = *regions_.exportIn(*arena_, true);
    Fd again(::dup(arena_->fd()));
    auto mapping = ArenaMapping::map(std::move(again), arena_->capacity());
    ASSERT_TRUE(mapping.ok());
    reader_ = std::make_shared<DeviceReader>(
        DeviceReader::Peer{std::move(*mapping), mirror, exports}, *loop_);
  }
  void TearDown() override {
    device_.isOpen = true;
    reader_->close();
    loop_->stop();
  }
  MemoryRegion share(Bytes& memory) {
    return std::move(*regions_.add(memory.data(), kBytes, kRemoteRead | kLasting, owner_));
  }
  ErrorCode findCode(const RemoteRegion& region) {
    const auto found = reader_->find(region, owner_);
    return found.ok() ? ErrorCode::kOk : found.error().code;
  }
  // Reads all of the region. The result comes when the copy has ended.
  std::future<ErrorCode> read(const RemoteRegion& region, Bytes& target,
                              const Completion* completion = nullptr) {
    auto done = std::make_shared<std::promise<ErrorCode>>();
    auto place = reader_->find(region, owner_);
    EXPECT_TRUE(place.ok());
    reader_->begin({.from = std::move(*place),
                    .target = target,
                    .owner = owner_,
                    .completion = completion,
                    .use = {},
                    .onEnd = [done](const Status& how) { done->set_value(how.code()); }});
    return done->get_future();
  }

  PatientDevice device_;
  const MemoryOwner owner_{&device_, 0};
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<Arena> arena_;
  RegionTable regions_;
  std::shared_ptr<DeviceReader> reader_;
  Doorbell bell_;
};

TEST_F(DeviceReaderTest, ReadsMemoryThatThePeerHasRegistered) {
  Bytes source = pattern(kBytes, 1), target(kBytes);
  const MemoryRegion region = share(source);
  EXPECT_EQ(read(region.remote(), target).get(), ErrorCode::kOk);
  EXPECT_EQ(target, source);
  std::ranges::copy(pattern(kBytes, 2), source.begin());  // at the same place
  EXPECT_EQ(read(region.remote(), target).get(), ErrorCode::kOk);
  EXPECT_EQ(target, source);
  EXPECT_EQ(device_.imports, 1) << "the mapping is used again";
}

TEST_F(DeviceReaderTest, UnmapsMemoryThatThePeerHasUnregistered) {
  Bytes first = pattern(kBytes, 1), second = pattern(kBytes, 2), target(kBytes);
  MemoryRegion region = share(first);
  EXPECT_EQ(read(region.remote(), target).get(), ErrorCode::kOk);
  const RemoteRegion before = region.remote();
  region = {};
  EXPECT_EQ(findCode(before), ErrorCode::kUnsupported);
  EXPECT_EQ(device_.closes, 0);
  region = share(second);  // in the same entry of the table
  EXPECT_EQ(findCode(before), ErrorCode::kUnsupported);
  EXPECT_EQ(read(region.remote(), target).get(), ErrorCode::kOk);
  EXPECT_EQ(target, second);
  EXPECT_EQ(device_.closes, 1);
  reader_->close();
  EXPECT_EQ(device_.closes, 2);
}

TEST_F(DeviceReaderTest, AMappingThatIsUsedStays) {
  Bytes first = pattern(kBytes, 1), second = pattern(kBytes, 2), target(kBytes), other(kBytes);
  MemoryRegion region = share(first);
  device_.isOpen = false;
  auto done = read(region.remote(), target);
  region = share(second);
  auto another = read(region.remote(), other);
  EXPECT_EQ(device_.closes, 0) << "a copy uses the first one";
  device_.isOpen = true;
  EXPECT_EQ(done.get(), ErrorCode::kOk);
  EXPECT_EQ(another.get(), ErrorCode::kOk);
  EXPECT_EQ(target, first);
  EXPECT_EQ(other, second);
}

TEST_F(DeviceReaderTest, MemoryThatCannotBeMappedIsTriedOnce) {
  Bytes source = pattern(kBytes, 1);
  const MemoryRegion region = share(source);
  device_.importResult = {ErrorCode::kSystem, "no peer access"};
  EXPECT_EQ(findCode(region.remote()), ErrorCode::kUnsupported);
  EXPECT_EQ(findCode(region.remote()), ErrorCode::kUnsupported);
  EXPECT_EQ(device_.imports, 1);
}

TEST_F(DeviceReaderTest, MemoryOfTwoAllocationsIsNotShared) {
  Bytes source = pattern(kBytes, 1);
  device_.bytesBehind = 1;
  const MemoryRegion region = share(source);
  EXPECT_EQ(findCode(region.remote()), ErrorCode::kUnsupported);
  Bytes host(kBytes);
  const auto ofHost = std::move(*regions_.add(host.data(), kBytes, kRemoteRead));
  EXPECT_EQ(findCode(ofHost.remote()), ErrorCode::kUnsupported);
  EXPECT_EQ(findCode({.address = 1, .bytes = 1, .key = 77}), ErrorCode::kUnsupported);
  EXPECT_EQ(device_.imports, 0);
}

TEST_F(DeviceReaderTest, WaitsForTheCopiesOfACompletion) {
  Bytes source = pattern(kBytes, 1), target(kBytes);
  const MemoryRegion region = share(source);
  Completion one(&bell_), other(&bell_);
  device_.isOpen = false;
  auto done = read(region.remote(), target, &one);
  reader_->await(&other);
  auto waited = std::async(std::launch::async, [&] { reader_->await(&one); });
  EXPECT_EQ(waited.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  device_.isOpen = true;
  waited.get();
  EXPECT_EQ(done.wait_for(std::chrono::seconds(0)), std::future_status::ready)
      << "its owner was told before";
  EXPECT_EQ(target, source);
}

TEST_F(DeviceReaderTest, ClosesBehindItsCopies) {
  Bytes source = pattern(kBytes, 1), target(kBytes), late(kBytes);
  const MemoryRegion region = share(source);
  device_.isOpen = false;
  auto done = read(region.remote(), target);
  auto place = reader_->find(region.remote(), owner_);
  auto closed = std::async(std::launch::async, [&] { reader_->close(); });
  EXPECT_EQ(closed.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  EXPECT_EQ(read(region.remote(), late).get(), ErrorCode::kAborted);
  EXPECT_EQ(device_.closes, 0);
  *place = {};
  device_.isOpen = true;
  closed.get();
  EXPECT_EQ(done.get(), ErrorCode::kOk);
  EXPECT_EQ(target, source);
  EXPECT_EQ(device_.closes, 1);
}

TEST_F(DeviceReaderTest, ACopyThatCannotBeginSaysSo) {
  Bytes source = pattern(kBytes, 1), target(kBytes);
  const MemoryRegion region = share(source);
  device_.copyResult = {ErrorCode::kSystem, "the context is lost"};
  EXPECT_EQ(read(region.remote(), target).get(), ErrorCode::kSystem);
  device_.copyResult = {};
  EXPECT_EQ(read(region.remote(), target).get(), ErrorCode::kOk);
  EXPECT_EQ(target, source);
}

class OfferedMemoryTest : public DeviceReaderTest {
 protected:
  void SetUp() override {
    DeviceReaderTest::SetUp();
    owners_ = std::move(*EventLoop::start("owner"));
    offers_ = std::move(*DescriptorOffers::start(*owners_));
    number_ = offers_->add(Fd(::dup(arena_->fd())));
    device_.shared.offered = memory_;
  }
  void TearDown() override {
    DeviceReaderTest::TearDown();
    owners_->stop();
    offers_.reset();
  }
  // A region in the second half of the offered memory.
  MemoryRegion offer() {
    return std::move(*regions_.addOffered(std::span(memory_).subspan(kBytes), owner_,
                                          {.handle = offers_->handle(),
                                           .allocation = number_,
                                           .offset = kBytes,
                                           .bytes = kBytes,
                                           .isOffered = true}));
  }
  std::future<ErrorCode> mapped(const RemoteRegion& region,
                                const Completion* completion = nullptr) {
    auto done = std::make_shared<std::promise<ErrorCode>>();
    reader_->whenMapped(region, owner_, completion,
                        [done](const Status& how) { done->set_value(how.code()); });
    return done->get_future();
  }
  // Holds the loop on which the owner hands its memory over.
  void holdOwner() {
    owners_->post([this] { goesOn_.get_future().wait(); });
  }

  Bytes memory_ = pattern(2 * kBytes, 3);
  std::unique_ptr<EventLoop> owners_;
  std::unique_ptr<DescriptorOffers> offers_;
  uint64_t number_ = 0;
  std::promise<void> goesOn_;
};

TEST_F(OfferedMemoryTest, IsMappedOnceWhenTheOwnerHasHandedItOver) {
  MemoryRegion region = offer();
  EXPECT_EQ(findCode(region.remote()), ErrorCode::kInterrupted);
  auto first = mapped(region.remote()), second = mapped(region.remote());
  EXPECT_EQ(first.get(), ErrorCode::kOk);
  EXPECT_EQ(second.get(), ErrorCode::kOk);
  Bytes target(kBytes);
  EXPECT_EQ(read(region.remote(), target).get(), ErrorCode::kOk);
  EXPECT_TRUE(std::ranges::equal(target, std::span(memory_).subspan(kBytes)));
  region = offer();
  EXPECT_EQ(read(region.remote(), target).get(), ErrorCode::kOk);
  EXPECT_EQ(device_.shared.maps, 1);
  EXPECT_EQ(device_.imports, 0);
  reader_->close();
  EXPECT_EQ(device_.shared.unmaps, 1);
}

TEST_F(OfferedMemoryTest, MemoryThatDoesNotComeIsAskedForAgain) {
  const MemoryRegion region = offer();
  number_ += 7;
  const MemoryRegion unknown = offer();
  EXPECT_EQ(mapped(unknown.remote()).get(), ErrorCode::kUnsupported);
  EXPECT_EQ(findCode(unknown.remote()), ErrorCode::kInterrupted);
  EXPECT_EQ(mapped(region.remote()).get(), ErrorCode::kOk);
  EXPECT_EQ(device_.shared.maps, 1);
}

TEST_F(OfferedMemoryTest, MemoryThatCannotBeMappedIsTriedOnce) {
  const MemoryRegion region = offer();
  device_.shared.mapResult = {ErrorCode::kUnsupported, "no peer access"};
  EXPECT_EQ(mapped(region.remote()).get(), ErrorCode::kOk);
  EXPECT_EQ(findCode(region.remote()), ErrorCode::kUnsupported);
  EXPECT_EQ(findCode(region.remote()), ErrorCode::kUnsupported);
  EXPECT_EQ(device_.shared.maps, 1);
}

TEST_F(OfferedMemoryTest, ACancelledGetDoesNotWaitForTheOwner) {
  const MemoryRegion region = offer();
  Completion one(&bell_), other(&bell_);
  holdOwner();
  auto first = mapped(region.remote(), &one), second = mapped(region.remote(), &other);
  reader_->await(&one);
  EXPECT_EQ(first.get(), ErrorCode::kAborted);
  EXPECT_EQ(second.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  goesOn_.set_value();
  EXPECT_EQ(second.get(), ErrorCode::kOk);
}

TEST_F(OfferedMemoryTest, AReaderThatClosesDoesNotWaitForTheOwner) {
  const MemoryRegion region = offer();
  holdOwner();
  auto first = mapped(region.remote());
  reader_->close();
  EXPECT_EQ(first.get(), ErrorCode::kAborted);
  EXPECT_EQ(mapped(region.remote()).get(), ErrorCode::kAborted);
  goesOn_.set_value();
  EXPECT_EQ(device_.shared.maps, 0);
}

TEST_F(OfferedMemoryTest, AReaderMayMapOfferedMemoryOnly) {
  Bytes source = pattern(kBytes, 1);
  reader_->close();
  Fd again(::dup(arena_->fd()));
  reader_ = std::make_shared<DeviceReader>(
      DeviceReader::Peer{std::move(*ArenaMapping::map(std::move(again), arena_->capacity())),
                         *regions_.mirrorIn(*arena_), *regions_.exportIn(*arena_, true), false},
      *loop_);
  const MemoryRegion ofHandle = share(source), region = offer();
  EXPECT_EQ(findCode(ofHandle.remote()), ErrorCode::kUnsupported);
  EXPECT_EQ(mapped(region.remote()).get(), ErrorCode::kOk);
  EXPECT_EQ(findCode(region.remote()), ErrorCode::kOk);
  EXPECT_EQ(device_.imports, 0);
}

}  // namespace
}  // namespace mooncake::testing
