#pragma once

#include <array>
#include <cstring>
#include <gtest/gtest.h>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "device/accelerator.h"
#include "device/replay_event.h"

// Tests that every accelerator with devices must pass. An accelerator's test file says
//
//   struct FakeKind {
//     static Result<std::unique_ptr<FakeKind>> open();  // an error skips the test
//     Accelerator& accelerator();
//     std::span<std::byte> allocate(int device, size_t bytes);  // memory of the device
//     void free(std::span<std::byte> memory);
//   };
//   INSTANTIATE_TYPED_TEST_SUITE_P(Fake, AcceleratorSuite, FakeKind);
namespace mooncake::testing {

inline constexpr std::chrono::seconds kDevicePatience{20};

template <typename Condition>
bool eventually(Condition holds) {
  const auto deadline = Deadline::after(kDevicePatience);
  while (!holds()) {
    if (deadline.passed()) return false;
    std::this_thread::yield();
  }
  return true;
}

template <typename T>
T valueOf(Result<T> result) {
  EXPECT_TRUE(result.ok()) << result.error().message;
  return result.ok() ? std::move(*result) : T();
}

inline std::unique_ptr<ReplayEvent> replayEvent(Accelerator& accelerator, int device) {
  return std::unique_ptr<ReplayEvent>(
      &dynamic_cast<ReplayEvent&>(*valueOf(accelerator.createEvent(device)).release()));
}

#define EXPECT_OK(call)                                                    \
  do {                                                                     \
    const ::mooncake::Status status_ = (call);                             \
    EXPECT_TRUE(status_.ok()) << #call << ": " << status_.error().message; \
  } while (false)

template <typename Kind>
class AcceleratorSuite : public ::testing::Test {
 protected:
  static constexpr size_t kBytes = 64 << 10;

  void SetUp() override {
    auto opened = Kind::open();
    if (!opened.ok()) GTEST_SKIP() << opened.error().message;
    kind = std::move(*opened);
    pinned = valueOf(accelerator().allocatePinned(kBytes));
    words = valueOf(accelerator().allocatePinned(kWords * sizeof(StreamWord)));
    ASSERT_FALSE(pinned.empty() || words.empty());
    std::memset(words.data(), 0, words.size());
    memory = kind->allocate(0, kBytes);
    ASSERT_FALSE(memory.empty());
  }
  void TearDown() override {
    if (!kind) return;
    for (int i = 0; i < kWords; ++i)
      word(i)->store(kOpen);  // a test that failed has waiting streams
    for (const DeviceStream stream : streams) {
      EXPECT_OK(accelerator().synchronize(stream));
      accelerator().destroyStream(stream);
    }
    if (!memory.empty()) kind->free(memory);
    if (!pinned.empty()) accelerator().freePinned(pinned);
    if (!words.empty()) accelerator().freePinned(words);
  }

  Accelerator& accelerator() { return kind->accelerator(); }
  StreamWord* word(int i) { return reinterpret_cast<StreamWord*>(words.data()) + i; }
  DeviceStream stream(int device = 0) {
    const auto made = valueOf(accelerator().createStream(device));
    streams.push_back(made);
    return made;
  }
  // Work of the stream from here on waits until the test stores kOpen in the word.
  void gate(DeviceStream stream, int i) { EXPECT_OK(accelerator().awaitWord(stream, word(i), 1)); }
  static void fill(std::span<std::byte> bytes, int seed) {
    for (size_t i = 0; i < bytes.size(); ++i)
      bytes[i] = static_cast<std::byte>((i * 131 + static_cast<size_t>(seed) * 29 + 7) % 251);
  }
  static bool holds(std::span<const std::byte> bytes, int seed) {
    std::vector<std::byte> wanted(bytes.size());
    fill(wanted, seed);
    return std::memcmp(wanted.data(), bytes.data(), bytes.size()) == 0;
  }

  static constexpr int kWords = 8;
  static constexpr uint32_t kOpen = 1;
  std::unique_ptr<Kind> kind;
  std::span<std::byte> pinned, memory, words;
  std::vector<DeviceStream> streams;
};

TYPED_TEST_SUITE_P(AcceleratorSuite);

TYPED_TEST_P(AcceleratorSuite, KnowsTheKindOfMemory) {
  Accelerator& accelerator = this->accelerator();
  ASSERT_GE(accelerator.deviceCount(), 1);
  std::array<std::byte, 16> pageable{};
  for (const void* host :
       {static_cast<const void*>(pageable.data()), static_cast<const void*>(0)}) {
    const auto place = valueOf(accelerator.placeOf(host));
    EXPECT_EQ(place.kind, MemoryKind::kHost);
    EXPECT_EQ(place.device, -1);
  }
  for (const size_t offset : {size_t(0), size_t(4097), this->kBytes - 1}) {
    EXPECT_EQ(valueOf(accelerator.placeOf(&this->pinned[offset])).kind, MemoryKind::kPinned);
    const auto place = valueOf(accelerator.placeOf(&this->memory[offset]));
    EXPECT_EQ(place.kind, MemoryKind::kDevice);
    EXPECT_EQ(place.device, 0);
  }
}

TYPED_TEST_P(AcceleratorSuite, CopiesRunLaterAndInOrder) {
  Accelerator& accelerator = this->accelerator();
  const DeviceStream stream = this->stream();
  const auto back = valueOf(accelerator.allocatePinned(this->kBytes));
  this->fill(this->pinned, 1);
  this->fill(back, 2);
  this->gate(stream, 0);
  EXPECT_OK(accelerator.copy(stream, this->memory.data(), this->pinned.data(), this->kBytes));
  EXPECT_OK(accelerator.copy(stream, back.data(), this->memory.data(), this->kBytes));
  EXPECT_TRUE(this->holds(back, 2));
  this->fill(this->pinned, 3);  // the copy reads it only after the gate
  this->word(0)->store(this->kOpen);
  EXPECT_OK(accelerator.synchronize(stream));
  EXPECT_TRUE(this->holds(back, 3));
  accelerator.freePinned(back);
}

TYPED_TEST_P(AcceleratorSuite, CopiesOfPageableMemoryWait) {
  Accelerator& accelerator = this->accelerator();
  const DeviceStream stream = this->stream();
  std::vector<std::byte> from(this->kBytes), to(this->kBytes);
  this->fill(from, 1);
  EXPECT_OK(accelerator.copy(stream, this->memory.data(), from.data(), this->kBytes));
  this->fill(from, 2);
  EXPECT_OK(accelerator.copy(stream, to.data(), this->memory.data(), this->kBytes));
  EXPECT_TRUE(this->holds(to, 1));
  EXPECT_OK(accelerator.copy(stream, to.data(), this->memory.data(), 0));
}

TYPED_TEST_P(AcceleratorSuite, AWordIsWrittenAfterTheWorkBeforeIt) {
  Accelerator& accelerator = this->accelerator();
  const DeviceStream stream = this->stream();
  this->fill(this->pinned, 1);
  const auto back = valueOf(accelerator.allocatePinned(this->kBytes));
  this->gate(stream, 0);
  EXPECT_OK(accelerator.copy(stream, this->memory.data(), this->pinned.data(), this->kBytes));
  EXPECT_OK(accelerator.copy(stream, back.data(), this->memory.data(), this->kBytes));
  EXPECT_OK(accelerator.writeWord(stream, this->word(1), 7));
  EXPECT_EQ(this->word(1)->load(), 0u);
  this->word(0)->store(this->kOpen);
  ASSERT_TRUE(eventually([&] { return this->word(1)->load() == 7; }));
  EXPECT_TRUE(this->holds(back, 1));
  accelerator.freePinned(back);
}

TYPED_TEST_P(AcceleratorSuite, AWordThatIsAwaitedMayWrap) {
  Accelerator& accelerator = this->accelerator();
  const DeviceStream stream = this->stream();
  this->word(0)->store(0xfffffffe);
  EXPECT_OK(accelerator.awaitWord(stream, this->word(0), 0xfffffffd));  // has passed
  EXPECT_OK(accelerator.writeWord(stream, this->word(1), 1));
  EXPECT_OK(accelerator.awaitWord(stream, this->word(0), 1));
  EXPECT_OK(accelerator.writeWord(stream, this->word(1), 2));
  ASSERT_TRUE(eventually([&] { return this->word(1)->load() != 0; }));
  EXPECT_EQ(this->word(1)->load(), 1u);
  this->word(0)->store(2);
  ASSERT_TRUE(eventually([&] { return this->word(1)->load() == 2; }));
}

TYPED_TEST_P(AcceleratorSuite, AStreamWaitsForTheRecordBeforeTheBlock) {
  Accelerator& accelerator = this->accelerator();
  const DeviceStream first = this->stream(), second = this->stream();
  const auto event = valueOf(accelerator.createEvent(0));
  this->gate(first, 0);
  EXPECT_OK(event->record(first));
  EXPECT_OK(event->block(second));
  EXPECT_OK(accelerator.writeWord(second, this->word(2), 1));
  this->gate(first, 1);
  EXPECT_OK(event->record(first));  // the block above does not wait for this one
  EXPECT_EQ(this->word(2)->load(), 0u);
  this->word(0)->store(this->kOpen);
  EXPECT_TRUE(eventually([&] { return this->word(2)->load() == 1; }));
  EXPECT_FALSE(valueOf(event->hasHappened()));
  this->word(1)->store(this->kOpen);
  EXPECT_TRUE(eventually([&] { return valueOf(event->hasHappened()); }));
}

TYPED_TEST_P(AcceleratorSuite, AnEventWithoutARecordHasHappened) {
  Accelerator& accelerator = this->accelerator();
  const DeviceStream stream = this->stream();
  const auto event = valueOf(accelerator.createEvent(0));
  EXPECT_TRUE(valueOf(event->hasHappened()));
  EXPECT_OK(event->block(stream));
  EXPECT_OK(accelerator.synchronize(stream));
}

TYPED_TEST_P(AcceleratorSuite, ADestroyedStreamEndsItsWork) {
  Accelerator& accelerator = this->accelerator();
  const DeviceStream stream = valueOf(accelerator.createStream(0));
  this->gate(stream, 0);
  EXPECT_OK(accelerator.writeWord(stream, this->word(1), 1));
  accelerator.destroyStream(stream);
  EXPECT_EQ(this->word(1)->load(), 0u);
  this->word(0)->store(this->kOpen);
  EXPECT_TRUE(eventually([&] { return this->word(1)->load() == 1; }));
}

TYPED_TEST_P(AcceleratorSuite, FreedPinnedMemoryIsThereForWorkBeforeIt) {
  Accelerator& accelerator = this->accelerator();
  const DeviceStream stream = this->stream();
  const auto source = valueOf(accelerator.allocatePinned(this->kBytes));
  this->fill(source, 1);
  this->gate(stream, 0);
  EXPECT_OK(accelerator.copy(stream, this->memory.data(), source.data(), this->kBytes));
  EXPECT_OK(accelerator.copy(stream, this->pinned.data(), this->memory.data(), this->kBytes));
  accelerator.freePinned(source);
  const auto other = valueOf(accelerator.allocatePinned(this->kBytes));
  this->fill(other, 2);  // is not the freed memory
  this->word(0)->store(this->kOpen);
  EXPECT_OK(accelerator.synchronize(stream));
  EXPECT_TRUE(this->holds(this->pinned, 1));
  accelerator.freePinned(other);
}

TYPED_TEST_P(AcceleratorSuite, NoCaptureIsOn) {
  EXPECT_FALSE(valueOf(this->accelerator().isCapturing(this->stream())));
}

TYPED_TEST_P(AcceleratorSuite, OnlyMemoryOfADeviceIsExported) {
  Accelerator& accelerator = this->accelerator();
  const auto exported = valueOf(accelerator.exportMemory(&this->memory[4096]));
  EXPECT_GT(exported.handle.size(), 0u);
  EXPECT_LE(exported.handle.size(), 64u);
  EXPECT_GE(exported.bytes, this->kBytes - 4096);
  std::array<std::byte, 16> pageable{};
  for (const void* other :
       {static_cast<const void*>(pageable.data()), static_cast<const void*>(this->pinned.data())}) {
    const auto refused = accelerator.exportMemory(other);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
  }
}

TYPED_TEST_P(AcceleratorSuite, ADeviceThatIsNotThereIsRefused) {
  Accelerator& accelerator = this->accelerator();
  for (const int device : {-1, accelerator.deviceCount()}) {
    EXPECT_EQ(accelerator.createStream(device).status().code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(accelerator.createEvent(device).status().code(), ErrorCode::kInvalidArgument);
    EXPECT_FALSE(accelerator.hasStreamWords(device));
  }
  EXPECT_EQ(accelerator.allocatePinned(0).status().code(), ErrorCode::kInvalidArgument);
}

REGISTER_TYPED_TEST_SUITE_P(AcceleratorSuite, KnowsTheKindOfMemory, CopiesRunLaterAndInOrder,
                            CopiesOfPageableMemoryWait, AWordIsWrittenAfterTheWorkBeforeIt,
                            AWordThatIsAwaitedMayWrap, AStreamWaitsForTheRecordBeforeTheBlock,
                            AnEventWithoutARecordHasHappened, ADestroyedStreamEndsItsWork,
                            FreedPinnedMemoryIsThereForWorkBeforeIt, NoCaptureIsOn,
                            OnlyMemoryOfADeviceIsExported, ADeviceThatIsNotThereIsRefused);

}  // namespace mooncake::testing
