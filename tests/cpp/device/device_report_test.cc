#include "device/device_report.h"

#include <gtest/gtest.h>

#include "device/accelerator_suite.h"
#include "device/fake/fake_devices.h"
#ifdef MOONCAKE_WITH_CUDA
#include "device/cuda/cuda_accelerator.h"
#include "device/scripted_driver.h"
#endif

namespace mooncake::testing {
namespace {

const std::string kOrdered = "; network cards: kernels see their writes in order";

TEST(DeviceReportTest, DevicesAreListedWithTheWaysBetweenThem) {
  const auto devices = makeFakeDevices();
  const auto found = reportDevices(*devices, true);
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[0].subject, "fake devices");
  EXPECT_EQ(found[0].text, "2, fake driver");
  EXPECT_EQ(found[2].subject, "fake device 1");
  EXPECT_EQ(found[2].text, "fake device; between processes: peer access to 0, 1" + kOrdered);
  EXPECT_TRUE(found[2].works);
}

TEST(DeviceReportTest, ABuildWithoutKernelsUsesTheEngine) {
  const auto devices = makeFakeDevices();
  EXPECT_EQ(reportDevices(*devices, false)[1].text,
            "fake device; between processes: the engine to 0, 1" + kOrdered);
}

TEST(DeviceReportTest, ADeviceThatDoesNotOrderCardsWritesSaysSo) {
  const auto devices = makeFakeDevices();
  devices->setCardWriteOrder(false);
  EXPECT_TRUE(reportDevices(*devices, true)[1].text.ends_with(
      "; network cards: they read back what they write"));
}

TEST(DeviceReportTest, ADeviceThatCannotShareSaysWhy) {
  const auto devices = makeFakeDevices();
  EXPECT_OK(
      devices->inject({.call = "checkSharing", .times = 100, .code = ErrorCode::kUnsupported}));
  const auto found = reportDevices(*devices, true)[1];
  EXPECT_FALSE(found.works);
  for (const char* part : {"shared host memory to 0, 1", "injected"})
    EXPECT_NE(found.text.find(part), std::string::npos) << found.text;
}

TEST(DeviceReportTest, AnErrorIsALineOfItsDevice) {
  const auto devices = makeFakeDevices();
  EXPECT_OK(devices->inject({.call = "canAccessPeer", .code = ErrorCode::kSystem}));
  const auto found = reportDevices(*devices, true);
  EXPECT_FALSE(found[1].works);
  EXPECT_NE(found[1].text.find("canAccessPeer"), std::string::npos) << found[1].text;
  EXPECT_TRUE(found[2].works);
}

#ifdef MOONCAKE_WITH_CUDA
TEST(DeviceReportTest, PeerAccessHasToGoBothWays) {
  ScriptedDriver driver;
  driver.devices = 3;
  driver.peers = {{0, 1}, {1, 0}, {0, 2}};
  driver.attributes[CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING] =
      CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER;
  const auto cuda = valueOf(CudaAccelerator::make(driver.table, {}));
  const auto found = reportDevices(*cuda, true);
  ASSERT_EQ(found.size(), 4u);
  EXPECT_EQ(found[0].text, "3, driver for CUDA 13.0");
  EXPECT_EQ(found[1].text,
            "Scripted GPU, sm_90; between processes: peer access to 0, 1; shared host memory to 2" +
                kOrdered);
  EXPECT_EQ(found[3].text,
            "Scripted GPU, sm_90; between processes: peer access to 2; shared host memory to 0, 1" +
                kOrdered);
  EXPECT_EQ(driver.countOf("cuDevicePrimaryCtxRetain"), 0);
}
#endif

}  // namespace
}  // namespace mooncake::testing
