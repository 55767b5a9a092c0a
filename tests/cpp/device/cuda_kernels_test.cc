#include <gtest/gtest.h>

#ifdef MOONCAKE_WITH_CUDA
#include <array>
#include <cstring>

#include "device/accelerator_suite.h"
#include "device/cuda/cuda_accelerator.h"
#include "device/kernel_launch.h"
#include "device/scripted_driver.h"
#include "kernels/kernel_id.h"
#include "kernels/probe.h"

namespace mooncake::testing {
namespace {

class CudaKernelsTest : public ::testing::Test {
 protected:
  void SetUp() override { open(image); }
  void open(std::span<const std::byte> kernels) {
    cuda = valueOf(CudaAccelerator::make(driver.table, kernels));
    driver.active = {0, 1};  // the program uses both devices
    driver.take();
  }
  static DeviceStream streamOf(int device) {
    return {.device = device, .handle = reinterpret_cast<void*>(0x40)};
  }
  static CUfunction functionOf(int device) {
    return reinterpret_cast<CUfunction>(static_cast<uintptr_t>(0x1000 * (device + 1) + 1));
  }

  ScriptedDriver driver;
  const std::array<std::byte, 4> image{};
  std::unique_ptr<CudaAccelerator> cuda;
  const kernels::ProbeArguments arguments{.out = nullptr, .count = 700, .value = 5};
  const KernelLaunch probe{
      .grid = 3, .block = 256, .sharedBytes = 64, .arguments = bytesOf(arguments)};
};

TEST_F(CudaKernelsTest, AKernelIsLaunchedAsTheCallerSays) {
  EXPECT_OK(cuda->prepareKernels(1));
  EXPECT_EQ(driver.image, image.data());
  driver.take();
  EXPECT_OK(cuda->launch(streamOf(1), probe));
  KernelLaunch cooperative = probe;
  cooperative.isCooperative = true;
  EXPECT_OK(cuda->launch(streamOf(1), cooperative));
  ASSERT_EQ(driver.launches.size(), 2u);
  const auto& launch = driver.launches[0];
  EXPECT_EQ(launch.function, functionOf(1));
  EXPECT_EQ(launch.grid, 3u);
  EXPECT_EQ(launch.block, 256u);
  EXPECT_EQ(launch.shared, 64u);
  EXPECT_EQ(launch.stream, static_cast<CUstream>(streamOf(1).handle));
  EXPECT_FALSE(launch.isCooperative);
  EXPECT_TRUE(driver.launches[1].isCooperative);
  kernels::ProbeArguments got;
  ASSERT_EQ(launch.arguments.size(), sizeof(got));
  std::memcpy(&got, launch.arguments.data(), sizeof(got));
  EXPECT_EQ(got.count, 700u);
  EXPECT_EQ(got.value, 5u);
  for (const std::string& call : driver.calls)
    EXPECT_TRUE(!call.starts_with("cuLaunch") || call == "cuLaunchKernelEx in 1") << call;
  EXPECT_TRUE(driver.stack.empty());
}

TEST_F(CudaKernelsTest, AllKernelsAreLoadedBeforeTheFirstLaunch) {
  const Status early = cuda->launch(streamOf(0), probe);
  EXPECT_EQ(early.code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(early.error().message.find("prepareKernels()"), std::string::npos);
  EXPECT_EQ(cuda->roomFor(probe, 0).status().code(), ErrorCode::kInvalidArgument);
  EXPECT_OK(cuda->prepareKernels(0));
  EXPECT_EQ(driver.countOf("cuKernelGetFunction"), int(kKernelCount));
  EXPECT_EQ(driver.countOf("cuFuncGetAttribute"), int(kKernelCount));
  EXPECT_EQ(driver.sharedLimits[functionOf(0)], 232448 - 48);
  EXPECT_EQ(cuda->launch(streamOf(1), probe).code(), ErrorCode::kInvalidArgument);
  EXPECT_OK(cuda->prepareKernels(1));
  EXPECT_OK(cuda->prepareKernels(0));
  EXPECT_EQ(driver.countOf("cuLibraryLoadData"), 1);  // the library serves all contexts
  EXPECT_EQ(driver.countOf("cuKernelGetFunction"), 2 * int(kKernelCount));
  driver.take();
  EXPECT_OK(cuda->launch(streamOf(0), probe));
  EXPECT_EQ(driver.countOf("cuKernelGetFunction"), 0);
}

TEST_F(CudaKernelsTest, KernelsThatDoNotLoadAreTriedAgain) {
  driver.results["cuKernelGetFunction"] = CUDA_ERROR_NO_BINARY_FOR_GPU;
  const Status failed = cuda->prepareKernels(0);
  EXPECT_EQ(failed.code(), ErrorCode::kUnsupported);
  EXPECT_NE(failed.error().message.find("cuKernelGetFunction of mooncake_probe on device 0"),
            std::string::npos)
      << failed.error().message;
  EXPECT_EQ(cuda->launch(streamOf(0), probe).code(), ErrorCode::kInvalidArgument);
  driver.results.clear();
  EXPECT_OK(cuda->prepareKernels(0));
  EXPECT_OK(cuda->launch(streamOf(0), probe));
  EXPECT_EQ(driver.countOf("cuLibraryLoadData"), 1);
}

TEST_F(CudaKernelsTest, ABuildWithoutKernelsSaysSo) {
  open({});
  for (const Status& refused : {cuda->prepareKernels(0), cuda->launch(streamOf(0), probe),
                                cuda->roomFor(probe, 0).status()}) {
    EXPECT_EQ(refused.code(), ErrorCode::kUnsupported);
    EXPECT_NE(refused.error().message.find("nvcc"), std::string::npos);
  }
  EXPECT_EQ(driver.calls.size(), 0u);
}

TEST_F(CudaKernelsTest, NoContextIsMadeForKernels) {
  driver.active.clear();
  EXPECT_EQ(cuda->prepareKernels(0).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(driver.countOf("cuLibraryLoadData"), 0);
  EXPECT_EQ(cuda->prepareKernels(2).code(), ErrorCode::kInvalidArgument);
}

TEST_F(CudaKernelsTest, TheRoomIsThatOfAllMultiprocessors) {
  EXPECT_OK(cuda->prepareKernels(0));
  const auto room = valueOf(cuda->roomFor(probe, 0));
  EXPECT_EQ(room.multiprocessors, 132);
  EXPECT_EQ(room.blocksEach, 8);
  EXPECT_EQ(room.blocks(), 132 * 8);
}

TEST_F(CudaKernelsTest, ALaunchThatFailsNamesItsKernel) {
  EXPECT_OK(cuda->prepareKernels(0));
  driver.results["cuLaunchKernelEx"] = CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  const Status large = cuda->launch(streamOf(0), probe);
  EXPECT_EQ(large.code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(large.error().message.find("mooncake_probe"), std::string::npos);
  driver.results["cuLaunchKernelEx"] = CUDA_ERROR_ILLEGAL_ADDRESS;
  EXPECT_EQ(cuda->launch(streamOf(0), probe).code(), ErrorCode::kSystem);
  driver.results.clear();
  EXPECT_EQ(cuda->launch(streamOf(0), probe).code(), ErrorCode::kSystem);
}

TEST_F(CudaKernelsTest, TheDriverAndItsDevicesHaveNames) {
  EXPECT_EQ(valueOf(cuda->describe(-1)), "driver for CUDA 13.0");
  EXPECT_EQ(valueOf(cuda->describe(1)), "Scripted GPU, sm_90");
  EXPECT_EQ(cuda->describe(2).status().code(), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace mooncake::testing
#endif
