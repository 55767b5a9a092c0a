#include <cstring>
#include <thread>

#include "device/fake/fake_devices.h"
#include "proxy_ranks.h"
#include "wires/sim/sim_transport.h"

// Commands that network cards carry out, into memory of a device that does not order their bytes.
namespace mooncake::proxy {
namespace {

using kernels::ProxyResult;
using std::chrono_literals::operator""s;

constexpr size_t kEach = 48 << 10;
constexpr uint64_t kPlaces = kRegionBytes / kEach, kCount = 150;

class ProxyCardWrites : public ::testing::Test {
 protected:
  ProxyCardWrites() : before_(defaultSimOptions()) {
    defaultSimOptions().odds = {.failed = 0, .late = 0, .lost = 0, .storm = 0, .death = 0};
    defaultSimOptions().closeEndsReads = true;
    defaultSimOptions().breakOdds = 0;
    fakeDevices().setCardWriteOrder(false);
  }
  ~ProxyCardWrites() override {
    fakeDevices().setCardWriteOrder(true);
    defaultSimOptions() = before_;
  }

 private:
  const SimOptions before_;
};

TEST_F(ProxyCardWrites, AreThereAheadOfTheirSignal) {
  ProxyRank sender("sim", 1), receiver("sim", 2);
  auto target = fakeDevices().allocate(0, kRegionBytes);
  ASSERT_TRUE(target.ok());
  const MemoryOwner owner{&fakeDevices(), 0};
  const auto make = [&](ProxyRank& one, uint32_t rank, std::span<std::byte> memory,
                        MemoryOwner of) {
    auto made = Proxy::create(
        one.engine, {{memory, of}},
        {.rank = rank, .ranks = 2, .signalWords = 1, .timeout = 60s, .kernelTimeout = 60s});
    ASSERT_TRUE(made.ok()) << made.error().message;
    one.proxy = std::move(*made);
  };
  make(sender, 0, sender.source, {});
  make(receiver, 1, *target, owner);
  const Bytes data = pattern(kRegionBytes, 9);
  std::ranges::copy(data, sender.source.begin());
  const auto peer = sender.open(receiver.engine->endpoint(), "rank 1");
  ASSERT_TRUE(sender.proxy->attach({nullptr, peer}, {{}, receiver.proxy->describe()}).ok());
  // Each command brings other bytes than the one before it at its place.
  const auto sourceOf = [](uint64_t n) { return n % kPlaces * kEach; };
  const auto targetOf = [](uint64_t n) { return n * 7 % (kPlaces - 1) * kEach; };
  uint64_t right = 0;
  const kernels::ProxyView view = sender.proxy->view(), theirs = receiver.proxy->view();
  for (uint64_t n = 0; n < kCount; ++n) {
    std::thread waits([&] {
      runKernel(1, 1, [&] {
        if (kernels::awaitSignal(theirs, 0, 0, n + 1) != ProxyResult::kDone) return;
        right += std::memcmp(&(*target)[targetOf(n)], &sender.source[sourceOf(n)], kEach) == 0;
      });
    });
    runKernel(1, 1, [&] { kernels::put(view, 1, {0, 0, sourceOf(n), targetOf(n), kEach, 0}); });
    waits.join();
  }
  EXPECT_EQ(right, kCount);
  const auto& channel = static_cast<const FabricChannel&>(*peer->channel);
  EXPECT_GT(channel.moved(), kCount / 2 * kEach);
  receiver.proxy.reset();
  fakeDevices().free(*target);
}

}  // namespace
}  // namespace mooncake::proxy
