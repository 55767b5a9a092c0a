#include "device/accelerators.h"

#include <array>
#include <future>
#include <gtest/gtest.h>

#include "device/accelerator_suite.h"

namespace mooncake::testing {
namespace {

TEST(AcceleratorsTest, AnAcceleratorIsOpenedOnce) {
  for (const char* name : {"host", "fake"}) {
    std::vector<std::future<Accelerator*>> opening;
    for (int i = 0; i < 4; ++i) {
      opening.push_back(
          std::async(std::launch::async, [=] { return valueOf(openAccelerator(name)); }));
    }
    for (auto& one : opening) EXPECT_EQ(one.get(), valueOf(openAccelerator(name)));
    EXPECT_STREQ(valueOf(openAccelerator(name))->name(), name);
  }
}

TEST(AcceleratorsTest, CudaIsThereOrSaysWhyNot) {
  const auto first = openAccelerator("cuda"), second = openAccelerator("cuda");
  if (first.ok()) {
    EXPECT_EQ(*first, valueOf(second));
    EXPECT_STREQ((*first)->name(), "cuda");
    return;
  }
  EXPECT_EQ(first.error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(first.error().message, second.error().message);
#ifdef MOONCAKE_WITH_CUDA
  EXPECT_TRUE(first.error().message.starts_with("there is no CUDA driver: libcuda.so.1") ||
              first.error().message.starts_with("cuda: cuInit"))
      << first.error().message;
#else
  EXPECT_TRUE(first.error().message.starts_with("this build knows no CUDA devices"));
#endif
}

TEST(AcceleratorsTest, AnotherNameIsAnError) {
  const auto opened = openAccelerator("gpu");
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(opened.error().message.find("\"gpu\""), std::string::npos);
}

TEST(HostAcceleratorTest, CopiesAtOnceAndHasNoDevice) {
  Accelerator& host = *valueOf(openAccelerator("host"));
  EXPECT_EQ(host.deviceCount(), 0);
  EXPECT_FALSE(host.hasStreamWords(0));
  std::array<std::byte, 4> from{std::byte{1}, std::byte{2}}, to{};
  EXPECT_EQ(valueOf(host.placeOf(from.data())).kind, MemoryKind::kHost);
  EXPECT_OK(host.copy({}, to.data(), from.data(), from.size()));
  EXPECT_EQ(to, from);
  EXPECT_OK(host.copy({}, nullptr, nullptr, 0));
  StreamWord word{0};
  for (const Status& status :
       {host.allocatePinned(1).status(), host.createStream(0).status(), host.synchronize({}),
        host.createEvent(0).status(), host.writeWord({}, &word, 1), host.awaitWord({}, &word, 1),
        host.isCapturing({}).status(), host.exportMemory(&word).status(),
        host.importMemory({}, 0).status(), host.closeMemory(&word)}) {
    EXPECT_EQ(status.code(), ErrorCode::kUnsupported);
    EXPECT_NE(status.error().message.find("\"host\" has none"), std::string::npos);
  }
  EXPECT_EQ(word.load(), 0u);
}

}  // namespace
}  // namespace mooncake::testing
