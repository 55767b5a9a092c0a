#include "proxy/proxy_memory.h"

#include <gtest/gtest.h>

#include "device/fake/fake_devices.h"
#include "device/peer_memory.h"

namespace mooncake::proxy {
namespace {

using kernels::ProxyCounts;

class ProxyMemoryTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kRanks = 3;

  void SetUp() override {
    auto made = devices->peerMemory()->allocateShared(0, kRanks * sizeof(ProxyCounts));
    ASSERT_TRUE(made.ok()) << made.error().message;
    counts = made->memory;
  }
  std::unique_ptr<ProxyMemory> create() {
    auto made = ProxyMemory::create(devices.get(), kRanks, 8, 1, {}, counts);
    EXPECT_TRUE(made.ok()) << made.error().message;
    return made.ok() ? std::move(*made) : nullptr;
  }
  // Returns the end that a kernel finds in the ring of rank 1.
  static uint32_t endedIn(const ProxyMemory& memory) {
    CommandRing ring = memory.ringOf(1);
    ring.end(kernels::ProxyEnd::kFailed);
    return memory.view().counts[1].ended;
  }

  const std::unique_ptr<FakeDevices> devices = makeFakeDevices();
  std::span<std::byte> counts;
};

TEST_F(ProxyMemoryTest, CountsAreInMemoryOfTheDeviceThatTheHostMaps) {
  const auto memory = create();
  EXPECT_TRUE(memory->countsMapped().ok());
  EXPECT_EQ(memory->view().counts, reinterpret_cast<ProxyCounts*>(counts.data()));
  EXPECT_EQ(memory->view().countLookNs, 0u);
  EXPECT_EQ(endedIn(*memory), uint32_t(kernels::ProxyEnd::kFailed));
}

TEST_F(ProxyMemoryTest, CountsAreInPinnedMemoryWhereTheHostCannotMap) {
  ASSERT_TRUE(
      devices->inject({.call = "mapForHost", .times = 1, .code = ErrorCode::kUnsupported}).ok());
  const auto memory = create();
  EXPECT_EQ(memory->countsMapped().code(), ErrorCode::kUnsupported);
  EXPECT_NE(memory->view().counts, reinterpret_cast<ProxyCounts*>(counts.data()));
  EXPECT_EQ(memory->view().countLookNs, kernels::kProxyLookNs);
  EXPECT_EQ(endedIn(*memory), uint32_t(kernels::ProxyEnd::kFailed));
}

TEST_F(ProxyMemoryTest, TooLittleMemoryIsRefused) {
  const auto refused = [&](std::span<std::byte> tickets, std::span<std::byte> some) {
    auto made = ProxyMemory::create(devices.get(), kRanks, 8, 1, tickets, some);
    return made.ok() ? std::string() : made.error().message;
  };
  EXPECT_NE(refused({}, counts.first(64)).find("the counts of 3 ranks take 192 bytes"),
            std::string::npos);
  EXPECT_NE(refused(counts.subspan(4), {}).find("the tickets of 3 ranks"), std::string::npos);
}

}  // namespace
}  // namespace mooncake::proxy
