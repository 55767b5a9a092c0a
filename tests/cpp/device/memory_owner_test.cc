#include "device/memory_owner.h"

#include <gtest/gtest.h>
#include <vector>

#include "device/fake/fake_devices.h"

namespace mooncake::testing {
namespace {

TEST(MemoryOwnerTest, EachDeviceOwnsItsMemory) {
  for (const int device : {0, 1}) {
    const auto memory = fakeDevices().allocate(device, 10'000);
    ASSERT_TRUE(memory.ok());
    for (const size_t at : {0, 1, 9'999}) {
      const auto owner = ownerOf(memory->data() + at, 1);
      ASSERT_TRUE(owner.ok());
      EXPECT_TRUE(*owner == (MemoryOwner{.accelerator = &fakeDevices(), .device = device}));
    }
    EXPECT_TRUE(ownerOf(memory->data(), 10'000).ok());
    fakeDevices().free(*memory);
  }
}

// The processor reaches pinned memory by itself.
TEST(MemoryOwnerTest, TheHostOwnsTheRest) {
  const std::vector<std::byte> pageable(100);
  const auto pinned = fakeDevices().allocatePinned(100);
  ASSERT_TRUE(pinned.ok());
  for (const std::byte* memory : {pageable.data(), static_cast<const std::byte*>(pinned->data())}) {
    const auto owner = ownerOf(memory, 100);
    ASSERT_TRUE(owner.ok());
    EXPECT_FALSE(*owner);
  }
  EXPECT_TRUE(ownerOf(nullptr, 0).ok());
  fakeDevices().freePinned(*pinned);
}

TEST(MemoryOwnerTest, ARangeOfTwoOwnersIsRefused) {
  const auto memory = fakeDevices().allocate(0, 4096);
  ASSERT_TRUE(memory.ok());
  const auto owner = ownerOf(memory->data(), size_t(1) << 30);
  EXPECT_EQ(owner.status().code(), ErrorCode::kInvalidArgument);
  fakeDevices().free(*memory);
}

TEST(MemoryOwnerTest, ADriverThatDoesNotAnswerIsAnError) {
  const std::byte byte{};
  ASSERT_TRUE(fakeDevices().inject({.call = "placeOf"}).ok());
  EXPECT_EQ(ownerOf(&byte, 1).status().code(), ErrorCode::kSystem);
  EXPECT_TRUE(ownerOf(&byte, 1).ok());
  // So it answers in a forked child: no memory there belongs to a device.
  ASSERT_TRUE(fakeDevices().inject({.call = "placeOf", .code = ErrorCode::kAborted}).ok());
  EXPECT_TRUE(ownerOf(&byte, 1).ok());
}

}  // namespace
}  // namespace mooncake::testing
