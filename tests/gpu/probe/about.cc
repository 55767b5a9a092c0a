#include <cstdio>

#include "check.h"
#include "device.h"
#include "driver.h"
#include "parts.h"

namespace probe {

void device() {
  openDevice();
  char name[128] = {};
  CUdevice handle = 0;
  int version = 0, low = 0, high = 0;
  CHECKED(driver.cuDeviceGet(&handle, 0));
  CHECKED(driver.cuDeviceGetName(name, sizeof(name) - 1, handle));
  CHECKED(driver.cuDriverGetVersion(&version));
  CHECKED(driver.cuCtxGetStreamPriorityRange(&low, &high));
  std::printf("[device] %s, sm_%d%d, %d multiprocessors, driver for CUDA %d.%d\n", name,
              attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
              attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
              attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT), version / 1000,
              version % 1000 / 10);
  std::printf(
      "[device] virtual memory %d, file descriptors %d, RDMA of virtual memory %d, "
      "cooperative launch %d, compute mode %d, priorities %d to %d\n",
      attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED),
      attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
      attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED),
      attribute(CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH),
      attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_MODE), low, high);
}

}  // namespace probe
