#include "device.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <thread>
#include <vector>

#include "check.h"
#include "clock.h"
#include "driver.h"

namespace probe {
namespace {

constexpr size_t kPage = 4096;

CUdevice theDevice = 0;
CUcontext theContext = nullptr;
std::vector<char> theImage;

}  // namespace

void openDevice() {
  CHECKED(driver.cuInit(0));
  CHECKED(driver.cuDeviceGet(&theDevice, 0));
  CHECKED(driver.cuDevicePrimaryCtxRetain(&theContext, theDevice));
  useContext();
}

CUcontext context() { return theContext; }

void useContext() { CHECKED(driver.cuCtxSetCurrent(theContext)); }

int attribute(CUdevice_attribute attribute) {
  int value = 0;
  CHECKED(driver.cuDeviceGetAttribute(&value, attribute, theDevice));
  return value;
}

bool readImage(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  theImage.assign(std::istreambuf_iterator<char>(file), {});
  return !theImage.empty();
}

const void* image() { return theImage.data(); }

CUfunction kernel(const char* name) {
  static CUmodule module = nullptr;
  if (module == nullptr) CHECKED(driver.cuModuleLoadData(&module, image()));
  CUfunction function = nullptr;
  CHECKED(driver.cuModuleGetFunction(&function, module, name));
  // The driver loads a kernel late. A question about it makes the driver load it now.
  int registers = 0;
  CHECKED(driver.cuFuncGetAttribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, function));
  return function;
}

void launch(CUfunction function, unsigned threads, CUstream stream, const void* arguments) {
  void* parameters[] = {const_cast<void*>(arguments)};
  CHECKED(driver.cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, stream, parameters, nullptr));
}

CUstream makeStream() {
  CUstream stream = nullptr;
  CHECKED(driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  return stream;
}

CUstream makeStream(int priority) {
  CUstream stream = nullptr;
  CHECKED(driver.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, priority));
  return stream;
}

CUevent makeEvent() {
  CUevent event = nullptr;
  CHECKED(driver.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  return event;
}

uint32_t* pinnedWords(size_t count) {
  const size_t bytes = std::max(count * sizeof(uint32_t), kPage);
  void* memory = nullptr;
  CHECKED(
      driver.cuMemHostAlloc(&memory, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
  std::memset(memory, 0, bytes);
  return static_cast<uint32_t*>(memory);
}

void store(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

uint32_t load(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

bool reaches(const uint32_t* word, uint32_t value, double milliseconds) {
  const auto begin = Clock::now();
  while (int32_t(load(word) - value) < 0) {
    // This thread may have slept for long, so it looks once more.
    if (millisecondsSince(begin) > milliseconds) return int32_t(load(word) - value) >= 0;
    std::this_thread::yield();
  }
  return true;
}

void awaitWord(CUstream stream, const uint32_t* word, uint32_t value) {
  CHECKED(driver.cuStreamWaitValue32(stream, addressOf(word), value, CU_STREAM_WAIT_VALUE_GEQ));
}

void writeWord(CUstream stream, uint32_t* word, uint32_t value) {
  CHECKED(
      driver.cuStreamWriteValue32(stream, addressOf(word), value, CU_STREAM_WRITE_VALUE_DEFAULT));
}

CUmemAllocationProp sharedProperties() {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = 0;
  properties.allocFlags.gpuDirectRDMACapable =
      attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0;
  return properties;
}

CUmemAccessDesc sharedAccess() {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = 0;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return access;
}

CUdeviceptr mapShared(CUmemGenericAllocationHandle handle) {
  CUdeviceptr start = 0;
  CHECKED(driver.cuMemAddressReserve(&start, kSharedBytes, 0, 0, 0));
  CHECKED(driver.cuMemMap(start, kSharedBytes, 0, handle, 0));
  const CUmemAccessDesc access = sharedAccess();
  CHECKED(driver.cuMemSetAccess(start, kSharedBytes, &access, 1));
  return start;
}

CUdeviceptr mapShared(int descriptor) {
  CUmemGenericAllocationHandle handle = 0;
  CHECKED(driver.cuMemImportFromShareableHandle(
      &handle, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)),
      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  const CUdeviceptr start = mapShared(handle);
  CHECKED(driver.cuMemRelease(handle));  // the mapping keeps the memory
  return start;
}

}  // namespace probe
