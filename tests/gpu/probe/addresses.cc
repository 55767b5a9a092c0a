#include <cstdio>
#include <thread>

#include "check.h"
#include "device.h"
#include "driver.h"
#include "parts.h"

namespace probe {
namespace {

// `type`: 1 is memory of the host, 2 is memory of a device, 0 is memory that the driver does not know.
void describe(const char* name, CUdeviceptr address, int expected) {
  uint64_t type = 0, ordinal = 0;
  CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                  CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  void* values[] = {&type, &ordinal};
  const CUresult all = driver.cuPointerGetAttributes(2, wanted, values, address);
  unsigned single = 0;
  const CUresult one =
      driver.cuPointerGetAttribute(&single, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address);
  std::printf(
      "[addresses]   %-24s cuPointerGetAttributes %s, type %d; cuPointerGetAttribute %s, "
      "type %u (%d expected)\n",
      name, nameOf(all), int(type), nameOf(one), single, expected);
}

}  // namespace

void addresses() {
  openDevice();
  CUdeviceptr plain = 0;
  CHECKED(driver.cuMemAlloc(&plain, 4096));
  const uint32_t* const pinned = pinnedWords(1);
  const CUmemAllocationProp properties = sharedProperties();
  CUmemGenericAllocationHandle handle = 0;
  CHECKED(driver.cuMemCreate(&handle, kSharedBytes, &properties, 0));
  const CUdeviceptr shared = mapShared(handle);
  const auto all = [&] {
    int local = 0;
    CUcontext current = nullptr;
    CHECKED(driver.cuCtxGetCurrent(&current));
    std::printf("[addresses] a thread %s a context:\n", current == nullptr ? "without" : "with");
    describe("memory of cuMemAlloc", plain, 2);
    describe("shared memory", shared, 2);
    describe("pinned memory", addressOf(pinned), 1);
    describe("the stack", addressOf(&local), 0);
  };
  std::thread(all).join();
  all();
}

}  // namespace probe
