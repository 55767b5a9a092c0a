#include "device/graph_memory.h"

#include <gtest/gtest.h>

#include "device/accelerator_suite.h"
#include "device/fake/fake_devices.h"

namespace mooncake::testing {
namespace {

TEST(GraphMemory, OperationsShareAndTensorsOfOneDoNot) {
  const auto devices = makeFakeDevices();
  GraphMemory memory(*devices, 1 << 20);
  GraphMemory::Taken first, second;
  const auto a = valueOf(memory.take(1000, first)), b = valueOf(memory.take(1000, first));
  EXPECT_GE(b.data() - a.data(), 1000);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(b.data()) % 64, 0u);
  EXPECT_EQ(valueOf(memory.take(10, second)).data(), a.data());
  // The operation that needs more has new memory. Later ones use both.
  const auto large = valueOf(memory.take(100'000, second));
  EXPECT_EQ(large.size(), 100'000u);
  GraphMemory::Taken third;
  EXPECT_EQ(valueOf(memory.take(100'000, third)).data(), large.data());
  EXPECT_NE(valueOf(memory.take(10, third)).data(), large.data());
}

TEST(GraphMemory, ALimitIsNamed) {
  const auto devices = makeFakeDevices();
  GraphMemory memory(*devices, 100'000);
  GraphMemory::Taken taken;
  EXPECT_OK(memory.take(60'000, taken).status());
  const auto refused = memory.take(60'000, taken);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kExhausted);
  EXPECT_NE(refused.error().message.find("MOONCAKE_GRAPH_MEMORY"), std::string::npos);
  // A smaller operation still fits.
  GraphMemory::Taken other;
  EXPECT_OK(memory.take(50'000, other).status());
}

}  // namespace
}  // namespace mooncake::testing
