#include "engine/memory/region_table.h"

#include <array>
#include <future>
#include <gtest/gtest.h>
#include <limits>
#include <thread>
#include <vector>

namespace mooncake {
namespace {

using namespace std::chrono_literals;

constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();

MemoryRegion addOrDie(RegionTable& table, std::span<std::byte> memory,
                      uint32_t rights = kRemoteRead) {
  auto region = table.add(memory.data(), memory.size(), rights);
  EXPECT_TRUE(region.ok());
  return std::move(*region);
}

class RegionTableTest : public testing::Test {
 protected:
  RegionTable table_;
  std::array<std::byte, 256> memory_{};
};

TEST_F(RegionTableTest, OpensWhatIsInside) {
  const MemoryRegion region = addOrDie(table_, memory_);
  const RemoteRegion remote = region.remote();
  EXPECT_EQ(remote.address, reinterpret_cast<uintptr_t>(memory_.data()));
  EXPECT_EQ(remote.bytes, memory_.size());
  EXPECT_NE(remote.key, 0u);
  const auto use = table_.open(remote.key, 16, 32, kRemoteRead);
  ASSERT_TRUE(use);
  EXPECT_EQ(use.data(), memory_.data() + 16);
  EXPECT_EQ(static_cast<void*>(&use.bell()), memory_.data());
  EXPECT_TRUE(table_.open(remote.key, 0, 256, kRemoteRead));
  EXPECT_TRUE(table_.open(remote.key, 256, 0, kRemoteRead));
  EXPECT_EQ(table_.refusals(), 0u);
}

TEST_F(RegionTableTest, RefusesWhatIsOutside) {
  const MemoryRegion region = addOrDie(table_, memory_);
  const uint64_t key = region.remote().key;
  const std::pair<uint64_t, uint64_t> ranges[] = {{0, 257},     {1, 256},         {256, 1},
                                                  {257, 0},     {kMax, 2},        {2, kMax},
                                                  {kMax, kMax}, {128, kMax - 127}};
  uint64_t refused = 0;
  for (const auto& [offset, bytes] : ranges) {
    EXPECT_FALSE(table_.open(key, offset, bytes, kRemoteRead)) << offset << " " << bytes;
    EXPECT_EQ(table_.refusals(), ++refused);
  }
}

TEST_F(RegionTableTest, RefusesKeysThatItDidNotHandOut) {
  const MemoryRegion region = addOrDie(table_, memory_);
  const uint64_t key = region.remote().key;
  for (const uint64_t wrong :
       {uint64_t(0), uint64_t(1), kMax, key + 1, key - 1, key + (uint64_t(1) << 32),
        key - (uint64_t(1) << 32), key + RegionTable::kCapacity}) {
    EXPECT_FALSE(table_.open(wrong, 0, 0, kRemoteRead)) << wrong;
  }
}

TEST_F(RegionTableTest, RefusesRightsThatWereNotGiven) {
  const MemoryRegion readable = addOrDie(table_, memory_, kRemoteRead);
  const MemoryRegion both = addOrDie(table_, memory_, kRemoteRead | kRemoteWrite);
  EXPECT_FALSE(table_.open(readable.remote().key, 0, 1, kRemoteWrite));
  EXPECT_FALSE(table_.open(readable.remote().key, 0, 1, kRemoteRead | kRemoteWrite));
  EXPECT_TRUE(table_.open(both.remote().key, 0, 1, kRemoteRead | kRemoteWrite));
}

TEST_F(RegionTableTest, ARevokedKeyStaysRefused) {
  uint64_t old;
  {
    const MemoryRegion region = addOrDie(table_, memory_);
    old = region.remote().key;
  }
  EXPECT_FALSE(table_.open(old, 0, 1, kRemoteRead));
  const MemoryRegion next = addOrDie(table_, memory_);  // takes the same entry
  EXPECT_EQ(next.remote().key & 0xffffffff, old & 0xffffffff);
  EXPECT_FALSE(table_.open(old, 0, 1, kRemoteRead));
  EXPECT_TRUE(table_.open(next.remote().key, 0, 1, kRemoteRead));
}

TEST_F(RegionTableTest, MovingKeepsTheKeyAndAssigningRevokesTheOld) {
  MemoryRegion a = addOrDie(table_, memory_);
  const uint64_t key = a.remote().key;
  MemoryRegion b = std::move(a);
  EXPECT_FALSE(a);  // NOLINT(bugprone-use-after-move): tests a moved-from region
  EXPECT_TRUE(table_.open(key, 0, 1, kRemoteRead));
  b = addOrDie(table_, memory_);
  EXPECT_FALSE(table_.open(key, 0, 1, kRemoteRead));
  EXPECT_TRUE(table_.open(b.remote().key, 0, 1, kRemoteRead));
}

TEST_F(RegionTableTest, SaysWhenItIsFull) {
  std::vector<MemoryRegion> regions;
  for (size_t i = 0; i < RegionTable::kCapacity; ++i) regions.push_back(addOrDie(table_, memory_));
  const auto tooMany = table_.add(memory_.data(), 1, kRemoteRead);
  ASSERT_FALSE(tooMany.ok());
  EXPECT_EQ(tooMany.error().code, ErrorCode::kExhausted);
  regions.pop_back();
  EXPECT_TRUE(table_.add(memory_.data(), 1, kRemoteRead).ok());
}

TEST_F(RegionTableTest, RefusesMemoryThatCannotBe) {
  EXPECT_FALSE(table_.add(nullptr, 1, kRemoteRead).ok());
  EXPECT_FALSE(table_.add(memory_.data(), kMax, kRemoteRead).ok());
  EXPECT_TRUE(table_.add(nullptr, 0, kRemoteRead).ok());  // a tensor without elements
}

TEST_F(RegionTableTest, RevokingWaitsForTheLastUser) {
  auto region = std::make_unique<MemoryRegion>(addOrDie(table_, memory_));
  const uint64_t key = region->remote().key;
  auto use = std::make_unique<RegionTable::Use>(table_.open(key, 0, 1, kRemoteRead));
  ASSERT_TRUE(*use);
  auto revoked = std::async(std::launch::async, [&] { region.reset(); });
  // Closed at once, although a user is still inside.
  const Deadline patience = Deadline::after(10s);
  while (table_.open(key, 0, 1, kRemoteRead) && !patience.passed()) std::this_thread::yield();
  ASSERT_FALSE(patience.passed());
  EXPECT_EQ(revoked.wait_for(0s), std::future_status::timeout);
  use.reset();
  EXPECT_EQ(revoked.wait_for(10s), std::future_status::ready);
}

// Under ThreadSanitizer this also shows that a reader never overlaps the memory's next owner.
TEST_F(RegionTableTest, ReadersAndRevokersMeetInOrder) {
  std::atomic<uint64_t> key{0};
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> opened{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      while (!stop.load()) {
        const auto use = table_.open(key.load(), 0, memory_.size(), kRemoteRead);
        if (!use) continue;
        EXPECT_EQ(use.data()[0], use.data()[255]);
        opened.fetch_add(1);
      }
    });
  }
  const Deadline patience = Deadline::after(30s);
  for (int round = 0; round < 2000 || (opened.load() < 1000 && !patience.passed()); ++round) {
    memory_.fill(std::byte(round));  // no user may be inside now
    const MemoryRegion region = addOrDie(table_, memory_);
    key.store(region.remote().key);
    std::this_thread::yield();
  }
  stop.store(true);
  for (auto& reader : readers) reader.join();
  EXPECT_GE(opened.load(), 1000u);
}

}  // namespace
}  // namespace mooncake
