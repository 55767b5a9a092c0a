#include <gtest/gtest.h>

#ifdef MOONCAKE_WITH_CUDA
#include "device/accelerator_suite.h"
#include "device/cuda/cuda_accelerator.h"
#include "device/peer_memory.h"
#include "device/scripted_driver.h"

namespace mooncake::testing {
namespace {

class CudaPeerMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    cuda = valueOf(CudaAccelerator::make(driver.table, {}));
    peers = cuda->peerMemory();
    driver.active = {0, 1};  // the program uses both devices
    driver.take();
  }
  const ScriptedDriver::Range& rangeOf(std::span<std::byte> memory) {
    return driver.ranges.at(reinterpret_cast<CUdeviceptr>(memory.data()));
  }

  ScriptedDriver driver;
  std::unique_ptr<CudaAccelerator> cuda;
  PeerMemory* peers = nullptr;
};

TEST_F(CudaPeerMemoryTest, AnAllocationIsRoundedMappedAndHandedOver) {
  const auto made = valueOf(peers->allocateShared(1, 5000));
  EXPECT_EQ(made.memory.size(), 0x2000u);
  EXPECT_TRUE(made.descriptor);
  EXPECT_EQ(rangeOf(made.memory).bytes, 0x2000u);
  EXPECT_EQ(rangeOf(made.memory).device, 1);
  ASSERT_EQ(driver.shared.size(), 1u);
  EXPECT_EQ(driver.shared.begin()->second.device, 1);
  EXPECT_EQ(driver.shared.begin()->second.users, 1);  // the mapping alone
  EXPECT_TRUE(driver.stack.empty());
}

TEST_F(CudaPeerMemoryTest, NetworkCardsMayUseTheMemoryIfTheDeviceAllowsIt) {
  for (const bool isAllowed : {false, true}) {
    driver.attributes[CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED] = isAllowed;
    const auto made = valueOf(peers->allocateShared(0, 64));
    EXPECT_EQ(driver.shared.begin()->second.isForCards, isAllowed);
    EXPECT_OK(peers->unmapShared(made.memory));
  }
}

TEST_F(CudaPeerMemoryTest, TheHostDoesNotMapMemoryWithoutGdrCopy) {
  const auto without = valueOf(CudaAccelerator::make(
      driver.table, {}, Error{ErrorCode::kUnsupported, "there is no GDRCopy"}));
  const auto made = valueOf(without->peerMemory()->allocateShared(0, 64));
  EXPECT_EQ(without->peerMemory()->mapForHost(made.memory).status().code(),
            ErrorCode::kUnsupported);
}

TEST_F(CudaPeerMemoryTest, AMappingKeepsTheMemoryAfterItsAllocationIsGone) {
  const auto made = valueOf(peers->allocateShared(0, 0x1000));
  const auto mapped = valueOf(peers->mapShared(made.descriptor, made.memory.size(), 1));
  EXPECT_NE(mapped.data(), made.memory.data());
  EXPECT_EQ(mapped.size(), 0x1000u);
  EXPECT_EQ(rangeOf(mapped).device, 1);
  EXPECT_EQ(driver.shared.begin()->second.users, 2);
  EXPECT_OK(peers->unmapShared(made.memory));
  EXPECT_EQ(driver.shared.size(), 1u);
  EXPECT_OK(peers->unmapShared(mapped));
  EXPECT_EQ(driver.shared.size(), 0u);
  EXPECT_EQ(driver.ranges.size(), 0u);
  EXPECT_EQ(peers->unmapShared(mapped).code(), ErrorCode::kInvalidArgument);
}

TEST_F(CudaPeerMemoryTest, AFailureLeavesNothingBehind) {
  for (const char* function :
       {"cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle",
        "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
    driver.results[function] = CUDA_ERROR_OUT_OF_MEMORY;
    const auto failed = peers->allocateShared(0, 0x1000);
    EXPECT_EQ(failed.status().code(), ErrorCode::kExhausted) << function;
    EXPECT_NE(failed.error().message.find(function), std::string::npos) << failed.error().message;
    EXPECT_TRUE(driver.shared.empty()) << function;
    EXPECT_TRUE(driver.ranges.empty()) << function;
    driver.results.clear();
  }
  driver.results["cuMemCreate"] = CUDA_ERROR_OUT_OF_MEMORY;
  EXPECT_NE(peers->allocateShared(0, 1).error().message.find("4096 bytes"), std::string::npos);
}

TEST_F(CudaPeerMemoryTest, AnImportThatFailsLeavesNothingBehind) {
  const auto made = valueOf(peers->allocateShared(0, 0x1000));
  for (const char* function :
       {"cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
    driver.results[function] = CUDA_ERROR_OUT_OF_MEMORY;
    const auto failed = peers->mapShared(made.descriptor, made.memory.size(), 1);
    EXPECT_EQ(failed.status().code(), ErrorCode::kExhausted) << function;
    EXPECT_EQ(driver.shared.begin()->second.users, 1) << function;
    EXPECT_EQ(driver.ranges.size(), 1u) << function;
    driver.results.clear();
  }
}

TEST_F(CudaPeerMemoryTest, ADeviceThatDoesNotReachTheMemorySaysSo) {
  const auto made = valueOf(peers->allocateShared(0, 0x1000));
  for (const CUresult result : {CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED}) {
    driver.results["cuMemSetAccess"] = result;
    const auto failed = peers->mapShared(made.descriptor, made.memory.size(), 1);
    EXPECT_EQ(failed.status().code(), ErrorCode::kUnsupported);
    EXPECT_NE(failed.error().message.find("Device 1 does not reach"), std::string::npos);
  }
}

TEST_F(CudaPeerMemoryTest, ADeviceThatCannotShareSaysWhy) {
  EXPECT_OK(peers->checkSharing(0));
  for (const auto& [attribute, part] : std::map<CUdevice_attribute, std::string>{
           {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory"},
           {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "descriptors"}}) {
    driver.attributes[attribute] = 0;
    const Status refused = peers->checkSharing(0);
    EXPECT_EQ(refused.code(), ErrorCode::kUnsupported);
    EXPECT_NE(refused.error().message.find(part), std::string::npos) << refused.error().message;
    EXPECT_EQ(peers->allocateShared(0, 1).status().code(), ErrorCode::kUnsupported);
    EXPECT_EQ(peers->mapShared(Fd(), 1, 0).status().code(), ErrorCode::kUnsupported);
    driver.attributes[attribute] = 1;
  }
  EXPECT_EQ(driver.countOf("cuMemCreate"), 0);
}

TEST_F(CudaPeerMemoryTest, DevicesReachEachOtherAsTheDriverSays) {
  driver.peers = {{0, 1}};
  EXPECT_TRUE(valueOf(peers->canAccessPeer(0, 1)));
  EXPECT_FALSE(valueOf(peers->canAccessPeer(1, 0)));
  EXPECT_TRUE(valueOf(peers->canAccessPeer(1, 1)));
  EXPECT_EQ(peers->canAccessPeer(0, 2).status().code(), ErrorCode::kInvalidArgument);
}

TEST_F(CudaPeerMemoryTest, NoContextIsMadeForSharedMemory) {
  driver.active.clear();
  EXPECT_EQ(peers->allocateShared(0, 64).status().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(driver.countOf("cuMemCreate"), 0);
  EXPECT_OK(peers->checkSharing(0));
  EXPECT_EQ(peers->allocateShared(0, 0).status().code(), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace mooncake::testing
#endif
