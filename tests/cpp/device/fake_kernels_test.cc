#include <algorithm>
#include <cstring>
#include <gtest/gtest.h>
#include <thread>
#include <vector>

#include "device/accelerator_suite.h"
#include "device/fake/fake_devices.h"
#include "device/probe_stand_in.h"
#include "kernels/probe.h"

namespace mooncake::testing {
namespace {

class FakeKernelsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    words = reinterpret_cast<uint32_t*>(valueOf(devices->allocate(0, 4096)).data());
  }
  void prepare() {
    devices->setKernels({.run = runProbe});
    EXPECT_OK(devices->prepareKernels(0));
  }
  // The launch copies the arguments, so they need not outlive this call.
  Status probe(uint32_t value, KernelLaunch launch = {.grid = 2, .block = 64}) {
    const kernels::ProbeArguments arguments{.out = words, .count = 100, .value = value};
    launch.arguments = bytesOf(arguments);
    return devices->launch(stream, launch);
  }

  const std::unique_ptr<FakeDevices> devices = makeFakeDevices();
  const DeviceStream stream = devices->defaultStream(0);
  uint32_t* words = nullptr;
};

TEST_F(FakeKernelsTest, DevicesWithoutKernelsSaySo) {
  EXPECT_EQ(devices->prepareKernels(0).code(), ErrorCode::kUnsupported);
  EXPECT_EQ(probe(1).code(), ErrorCode::kUnsupported);
  EXPECT_EQ(devices->roomFor({}, 0).status().code(), ErrorCode::kUnsupported);
  prepare();
  devices->setKernels({});
  EXPECT_EQ(probe(1).code(), ErrorCode::kUnsupported);
}

TEST_F(FakeKernelsTest, AKernelRunsInItsStreamsOrder) {
  prepare();
  words[100] = 7;
  const auto before = valueOf(devices->allocatePinned(400)),
             after = valueOf(devices->allocatePinned(400));
  EXPECT_OK(probe(1000));
  EXPECT_OK(devices->copy(stream, before.data(), words, 400));
  EXPECT_OK(probe(5000));
  EXPECT_OK(devices->copy(stream, after.data(), words, 400));
  EXPECT_OK(devices->synchronize(stream));
  for (uint32_t i = 0; i < 100; ++i) {
    EXPECT_EQ(reinterpret_cast<uint32_t*>(before.data())[i], 1000 + i);
    EXPECT_EQ(reinterpret_cast<uint32_t*>(after.data())[i], 5000 + i);
  }
  EXPECT_EQ(words[100], 7u);
}

TEST_F(FakeKernelsTest, AKernelRunsOnTheThreadOfItsStream) {
  std::thread::id thread;
  DeviceStream seen{.device = -1};
  devices->setKernels({.run = [&](DeviceStream on, const KernelLaunch&) {
    thread = std::this_thread::get_id();
    seen = on;
    return Status();
  }});
  EXPECT_OK(devices->prepareKernels(1));
  const DeviceStream other = valueOf(devices->createStream(1));
  EXPECT_OK(devices->launch(other, {}));
  EXPECT_OK(devices->synchronize(other));
  EXPECT_NE(thread, std::this_thread::get_id());
  EXPECT_EQ(seen.device, 1);
  EXPECT_EQ(seen.handle, other.handle);
}

TEST_F(FakeKernelsTest, KernelsArePreparedForEachDevice) {
  devices->setKernels({.run = runProbe});
  EXPECT_EQ(probe(1).code(), ErrorCode::kInvalidArgument);
  EXPECT_OK(devices->prepareKernels(1));
  EXPECT_EQ(probe(1).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(devices->prepareKernels(2).code(), ErrorCode::kInvalidArgument);
  EXPECT_OK(devices->prepareKernels(0));
  EXPECT_OK(probe(1));
  devices->setKernels({.run = runProbe});
  EXPECT_EQ(probe(1).code(), ErrorCode::kInvalidArgument);
}

TEST_F(FakeKernelsTest, LaunchesBeyondTheLimitsAreRefused) {
  prepare();
  EXPECT_EQ(valueOf(devices->roomFor({}, 0)).blocks(), 8);
  EXPECT_OK(probe(1, {.grid = 8, .block = 1024, .isCooperative = true}));
  for (const KernelLaunch& launch :
       {KernelLaunch{.grid = 0}, KernelLaunch{.block = 0}, KernelLaunch{.block = 1025},
        KernelLaunch{.grid = 9, .isCooperative = true}})
    EXPECT_EQ(probe(1, launch).code(), ErrorCode::kInvalidArgument);
  EXPECT_OK(probe(1, {.grid = 9}));
}

TEST_F(FakeKernelsTest, ALaunchIsRecordedIntoAGraph) {
  prepare();
  EXPECT_OK(devices->beginCapture(stream));
  EXPECT_OK(probe(300));
  std::fill(words, words + 100, 0);
  const uint64_t graph = valueOf(devices->endCapture(stream));
  EXPECT_OK(devices->synchronize(stream));
  EXPECT_EQ(words[5], 0u);
  EXPECT_OK(devices->replay(graph, stream));
  EXPECT_OK(devices->synchronize(stream));
  EXPECT_EQ(words[5], 305u);
}

TEST_F(FakeKernelsTest, AKernelThatFailsLosesTheContext) {
  devices->setKernels({.run = [](DeviceStream, const KernelLaunch&) {
    return Status(ErrorCode::kSystem, "block 0 hangs");
  }});
  EXPECT_OK(devices->prepareKernels(0));
  EXPECT_OK(devices->launch(stream, {}));
  EXPECT_TRUE(eventually([&] { return !devices->placeOf(words).ok(); }));
  const auto later = devices->createStream(0);
  ASSERT_FALSE(later.ok());
  EXPECT_EQ(later.error().code, ErrorCode::kSystem);
  EXPECT_NE(later.error().message.find("block 0 hangs"), std::string::npos);
}

TEST_F(FakeKernelsTest, AnInjectedLaunchDoesNotRun) {
  prepare();
  words[5] = 0;
  EXPECT_OK(devices->inject({.call = "launch", .code = ErrorCode::kExhausted}));
  EXPECT_EQ(probe(1).code(), ErrorCode::kExhausted);
  EXPECT_OK(devices->synchronize(stream));
  EXPECT_EQ(words[5], 0u);
}

}  // namespace
}  // namespace mooncake::testing
