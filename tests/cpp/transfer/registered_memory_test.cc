#include "transfer/registered_memory.h"

#include <gtest/gtest.h>

#include "base/bytes.h"

// Memory of a program that an engine has registered.
namespace mooncake::transfer {
namespace {

uint64_t addressOf(const Bytes& bytes) { return reinterpret_cast<uint64_t>(bytes.data()); }

// A program that registers up to the limit must not stop transfers, which register memory while
// they run.
TEST(RegisteredMemory, AProgramLeavesRoomInTheTable) {
  RegionTable regions;
  RegisteredMemory memory(regions);
  Bytes pool(1), bytes(RegisteredMemory::kMost + 1);
  std::string why;
  ASSERT_EQ(memory.add(addressOf(pool), 1, {.location = "cpu:0", .isOurs = true}, why), kGood);
  for (size_t i = 0; i < RegisteredMemory::kMost; ++i)
    ASSERT_EQ(memory.add(addressOf(bytes) + i, 1, {}, why), kGood) << i << ": " << why;
  EXPECT_EQ(memory.add(addressOf(bytes) + RegisteredMemory::kMost, 1, {}, why), kMemory);
  EXPECT_NE(why.find("65536 registrations"), std::string::npos) << why;
  EXPECT_TRUE(regions.add(bytes.data(), bytes.size(), kRemoteRead).ok());
  ASSERT_EQ(memory.remove(addressOf(bytes), why), kGood);
  EXPECT_EQ(memory.add(addressOf(bytes), 1, {}, why), kGood) << why;
}

}  // namespace
}  // namespace mooncake::transfer
