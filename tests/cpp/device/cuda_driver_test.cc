#include <gtest/gtest.h>

#ifdef MOONCAKE_WITH_CUDA
#include <dlfcn.h>
#include <unistd.h>

#include "child_process.h"
#include "device/accelerator_suite.h"
#include "device/cuda/cuda_accelerator.h"
#include "device/cuda/open_cuda.h"
#include "device/peer_memory_suite.h"
#include "device/scripted_driver.h"

namespace mooncake::testing {
namespace {

// ---- the real driver, where there is one

// The program that uses device 0.
struct CudaKind {
  static Result<std::unique_ptr<CudaKind>> open() {
    auto opened = openCuda();
    if (!opened.ok()) return opened.error();
    auto kind = std::make_unique<CudaKind>();
    kind->cuda = std::move(*opened);
    kind->driver = valueOf(CudaDriver::load());
    void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    kind->memAlloc = reinterpret_cast<decltype(kind->memAlloc)>(::dlsym(library, "cuMemAlloc_v2"));
    kind->memFree = reinterpret_cast<decltype(kind->memFree)>(::dlsym(library, "cuMemFree_v2"));
    CUdevice device = 0;
    CUcontext context = nullptr;
    EXPECT_EQ(kind->driver.cuDeviceGet(&device, 0), CUDA_SUCCESS);
    EXPECT_EQ(kind->driver.cuDevicePrimaryCtxRetain(&context, device), CUDA_SUCCESS);
    EXPECT_EQ(kind->driver.cuCtxPushCurrent(context), CUDA_SUCCESS);
    return kind;
  }
  ~CudaKind() {
    CUcontext context = nullptr;
    EXPECT_EQ(driver.cuCtxPopCurrent(&context), CUDA_SUCCESS);
  }
  Accelerator& accelerator() { return *cuda; }
  std::span<std::byte> allocate(int, size_t bytes) {
    CUdeviceptr start = 0;
    EXPECT_EQ(memAlloc(&start, bytes), CUDA_SUCCESS);
    return {reinterpret_cast<std::byte*>(start), bytes};
  }
  void free(std::span<std::byte> memory) {
    EXPECT_EQ(memFree(reinterpret_cast<CUdeviceptr>(memory.data())), CUDA_SUCCESS);
  }

  static constexpr const char* kChild = "Cuda/PeerMemorySuite/0.DISABLED_IsTheOwner";
  void useKernels() {}

  CudaDriver driver;
  std::unique_ptr<Accelerator> cuda;
  decltype(&::cuMemAlloc) memAlloc = nullptr;
  decltype(&::cuMemFree) memFree = nullptr;
};

INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, AcceleratorSuite, CudaKind);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, PeerMemorySuite, CudaKind);

// ---- loading

TEST(CudaDriverTest, AMachineWithoutADriverSaysSo) {
  const auto loaded = CudaDriver::load("libcuda-that-is-nowhere.so.1");
  ASSERT_FALSE(loaded.ok());
  EXPECT_EQ(loaded.error().code, ErrorCode::kUnsupported);
  for (const char* part : {"there is no CUDA driver", "libcuda-that-is-nowhere.so.1"})
    EXPECT_NE(loaded.error().message.find(part), std::string::npos) << loaded.error().message;
}

TEST(CudaDriverTest, ADriverThatIsTooOldSaysWhatItLacks) {
  const auto loaded = CudaDriver::load("libm.so.6");
  ASSERT_FALSE(loaded.ok());
  EXPECT_EQ(loaded.error().code, ErrorCode::kUnsupported);
  for (const char* function : {"cuInit", "cuMemGetAddressRange_v2", "cuStreamWaitValue32_v2",
                               "cuCtxPushCurrent_v2", "cuIpcOpenMemHandle_v2"})
    EXPECT_NE(loaded.error().message.find(function), std::string::npos) << loaded.error().message;
}

// The driver's library, as CudaDriver::load() would read it.
Result<CudaDriver> loadScripted(const ScriptedDriver& driver) {
  return CudaDriver::find([&](const char* name) { return driver.symbol(name); }, "libscripted.so");
}

TEST(CudaDriverTest, AnOldDriverSaysItsVersionAndWhatItLacks) {
  ScriptedDriver driver;
  driver.version = 11040;
  EXPECT_TRUE(loadScripted(driver).ok());
  driver.missing = {"cuLibraryLoadData", "cuLaunchKernelEx"};
  const auto loaded = loadScripted(driver);
  ASSERT_FALSE(loaded.ok());
  EXPECT_EQ(loaded.error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(loaded.error().message,
            "the CUDA driver libscripted.so, for CUDA 11.4, lacks cuLibraryLoadData, "
            "cuLaunchKernelEx. Install a driver for CUDA 12 or later");
}

TEST(CudaDriverTest, EachFunctionOfTheTableIsRequired) {
  ScriptedDriver driver;
  std::vector<std::string> names;
  ASSERT_TRUE(CudaDriver::find(
                  [&](const char* name) {
                    names.emplace_back(name);
                    return driver.symbol(name);
                  },
                  "libscripted.so")
                  .ok());
  EXPECT_GT(names.size(), 50u);
  for (const std::string& name : names) {
    driver.missing = {name};
    const auto loaded = loadScripted(driver);
    ASSERT_FALSE(loaded.ok()) << name;
    EXPECT_NE(loaded.error().message.find(" lacks " + name + "."), std::string::npos)
        << loaded.error().message;
  }
}

TEST(CudaDriverTest, ADriverThatDoesNotTellItsVersionIsRefusedWithoutIt) {
  ScriptedDriver driver;
  driver.missing = {"cuMemCreate"};
  driver.results["cuDriverGetVersion"] = CUDA_ERROR_INVALID_VALUE;
  const std::string message = loadScripted(driver).status().error().message;
  EXPECT_TRUE(message.starts_with("the CUDA driver libscripted.so lacks cuMemCreate. ")) << message;
}

// The toolkit has a library with all names of the driver and nothing behind them.
constexpr const char* kStub = "/usr/local/cuda/lib64/stubs/libcuda.so";

TEST(CudaDriverTest, DISABLED_TheStubHasAllFunctions) {
  const auto loaded = CudaDriver::load(kStub);
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  const auto made = CudaAccelerator::make(*loaded, {});
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(made.error().message.find("toolkit's stub"), std::string::npos) << made.error().message;
}

// In a process of its own: the stub would stand in for the driver in this one.
TEST(CudaDriverTest, TheTableHasTheDriversNames) {
  if (::access(kStub, R_OK) != 0) GTEST_SKIP() << "no toolkit of CUDA: " << kStub;
  ChildProcess child("CudaDriverTest.DISABLED_TheStubHasAllFunctions");
  EXPECT_EQ(child.finish(), 0);
}

}  // namespace
}  // namespace mooncake::testing
#endif
