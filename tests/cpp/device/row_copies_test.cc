#include "device/row_copies.h"

#include <cstring>
#include <gtest/gtest.h>
#include <optional>
#include <vector>

#include "device/accelerator_suite.h"
#include "device/fake/fake_devices.h"
#include "device/kernel_launch.h"
#include "kernels/copy_rows.h"
#include "kernels/kernel_id.h"

namespace mooncake::testing {
namespace {

class RowCopiesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    devices->setKernels({.run = [this](DeviceStream, const KernelLaunch& launch) -> Status {
      launched = launch;
      std::memcpy(&arguments, launch.arguments.data(), sizeof(arguments));
      return {};
    }});
    EXPECT_OK(prepareRowCopies(*devices, 0));
  }
  void copy(uint32_t blocks, uint32_t rows, size_t rowBytes) {
    const RowCopy one{.to = &to,
                      .from = &from,
                      .counts = &count,
                      .blocks = blocks,
                      .blocksEach = 1,
                      .rows = rows,
                      .rowBytes = rowBytes};
    EXPECT_OK(copyRows(*devices, stream, one));
    EXPECT_OK(devices->synchronize(stream));
  }

  const std::unique_ptr<FakeDevices> devices = makeFakeDevices();
  const DeviceStream stream = devices->defaultStream(0);
  std::optional<KernelLaunch> launched;
  kernels::CopyRowsArguments arguments{};
  int from = 1, to = 2, count = 3;
};

TEST_F(RowCopiesTest, SmallCopiesHaveOneBlock) {
  copy(2, 8, 512);
  ASSERT_TRUE(launched);
  EXPECT_EQ(launched->kernel, KernelId::kCopyRows);
  EXPECT_EQ(launched->grid, 1u);
  EXPECT_LE(launched->block, kernels::kCountsAtOnce);
  EXPECT_EQ(arguments.to, reinterpret_cast<unsigned char*>(&to));
  EXPECT_EQ(arguments.from, reinterpret_cast<const unsigned char*>(&from));
  EXPECT_EQ(arguments.counts, &count);
  EXPECT_EQ(arguments.blocks, 2u);
  EXPECT_EQ(arguments.rows, 8u);
  EXPECT_EQ(arguments.rowBytes, 512u);
}

TEST_F(RowCopiesTest, LargeCopiesLeaveMostOfTheDeviceFree) {
  copy(32, 1024, 14336);
  ASSERT_TRUE(launched);
  EXPECT_EQ(launched->grid, 16u);
  EXPECT_EQ(launched->block, 512u);
}

TEST_F(RowCopiesTest, NothingIsLaunchedForNoBytes) {
  copy(0, 8, 512);
  copy(2, 0, 512);
  EXPECT_FALSE(launched);
}

TEST(RowCopiesWithoutKernelsTest, AreUnsupported) {
  const auto devices = makeFakeDevices();
  EXPECT_EQ(prepareRowCopies(*devices, 0).code(), ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace mooncake::testing
