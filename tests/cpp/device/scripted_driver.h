#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "device/cuda/cuda_driver.h"

namespace mooncake::testing {

// A driver of CUDA with two devices that does as little as the tests need, and writes down each call
// with the context that was current. One at a time, and one thread.
class ScriptedDriver {
 public:
  ScriptedDriver() {
    self() = this;
    fill();
  }
  ~ScriptedDriver() { self() = nullptr; }
  ScriptedDriver(const ScriptedDriver&) = delete;
  ScriptedDriver& operator=(const ScriptedDriver&) = delete;

  static CUcontext contextOf(int device) {
    return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device + 1));
  }

  // An allocation that the driver knows.
  struct Memory {
    CUmemorytype type = CU_MEMORYTYPE_DEVICE;
    int device = 0;
    size_t bytes = 0;
    bool isExportable = true;
  };
  struct Copy {
    CUdeviceptr to = 0, from = 0;
    size_t bytes = 0;
  };
  struct Word {
    CUdeviceptr address = 0;
    uint32_t value = 0;
    unsigned flags = 0;
  };

  CudaDriver table;
  int devices = 2;
  std::set<int> active;          // devices with a primary context
  std::vector<CUcontext> stack;  // the thread's contexts, the current one last
  CUstreamCaptureMode captureMode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::map<std::string, CUresult> results;  // of functions that fail
  std::map<CUdeviceptr, Memory> memory;
  std::set<CUstream> capturing;
  std::set<CUstream> busy;               // events that are recorded on these do not happen
  std::map<CUevent, CUstream> recorded;  // the last stream of each event that lives
  std::map<CUdeviceptr, int> imports;
  std::vector<std::string> calls;  // "cuMemcpyAsync in 0": context of device 0; "-": none
  std::vector<Copy> copies;
  std::vector<Word> writes, waits;
  unsigned eventFlags = 0, streamFlags = 0, hostFlags = 0, importFlags = 0;

  // Returns the calls since the last time.
  std::vector<std::string> take() { return std::exchange(calls, {}); }
  int countOf(const std::string& function) const {
    int found = 0;
    for (const std::string& call : calls) found += call.starts_with(function + " ");
    return found;
  }

 private:
  static ScriptedDriver*& self() {
    static ScriptedDriver* current = nullptr;
    return current;
  }
  // Writes the call down, and returns its result.
  CUresult called(const std::string& function) {
    const uintptr_t current = stack.empty() ? 0 : reinterpret_cast<uintptr_t>(stack.back());
    calls.push_back(function + " in " + (current == 0 ? "-" : std::to_string(current - 1)));
    const auto found = results.find(function);
    return found == results.end() ? CUDA_SUCCESS : found->second;
  }
  void fill();

  std::vector<std::vector<std::byte>> hostMemory_;
  uintptr_t lastHandle_ = 0x100;
};

inline void ScriptedDriver::fill() {
  table.cuInit = [](unsigned) { return self()->called("cuInit"); };
  table.cuGetErrorName = [](CUresult error, const char** name) {
    *name = error == CUDA_ERROR_ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER";
    return static_cast<int>(error) == 4711 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
  };
  table.cuGetErrorString = [](CUresult error, const char** text) {
    *text = "as the driver says it";
    return static_cast<int>(error) == 4711 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
  };
  table.cuDeviceGet = [](CUdevice* device, int ordinal) {
    *device = ordinal;
    return self()->called("cuDeviceGet");
  };
  table.cuDeviceGetCount = [](int* count) {
    *count = self()->devices;
    return self()->called("cuDeviceGetCount");
  };
  table.cuDevicePrimaryCtxGetState = [](CUdevice device, unsigned* flags, int* isActive) {
    *flags = 0;
    *isActive = self()->active.contains(device);
    return self()->called("cuDevicePrimaryCtxGetState");
  };
  table.cuDevicePrimaryCtxRetain = [](CUcontext* context, CUdevice device) {
    *context = contextOf(device);
    self()->active.insert(device);
    return self()->called("cuDevicePrimaryCtxRetain");
  };
  table.cuCtxGetCurrent = [](CUcontext* context) {
    *context = self()->stack.empty() ? nullptr : self()->stack.back();
    return self()->called("cuCtxGetCurrent");
  };
  table.cuCtxGetDevice = [](CUdevice* device) {
    *device = static_cast<int>(reinterpret_cast<uintptr_t>(self()->stack.back())) - 1;
    return self()->called("cuCtxGetDevice");
  };
  table.cuCtxPushCurrent = [](CUcontext context) {
    const CUresult result = self()->called("cuCtxPushCurrent");
    if (result == CUDA_SUCCESS) self()->stack.push_back(context);
    return result;
  };
  table.cuCtxPopCurrent = [](CUcontext* context) {
    *context = self()->stack.back();
    const CUresult result = self()->called("cuCtxPopCurrent");
    self()->stack.pop_back();
    return result;
  };
  table.cuThreadExchangeStreamCaptureMode = [](CUstreamCaptureMode* mode) {
    const CUresult result = self()->called("cuThreadExchangeStreamCaptureMode");
    if (result == CUDA_SUCCESS) std::swap(self()->captureMode, *mode);
    return result;
  };
  table.cuPointerGetAttributes = [](unsigned count, CUpointer_attribute* wanted, void** values,
                                    CUdeviceptr address) {
    auto after = self()->memory.upper_bound(address);
    const Memory* found = nullptr;
    if (after != self()->memory.begin() && address - (--after)->first < after->second.bytes)
      found = &after->second;
    for (unsigned i = 0; i < count; ++i) {
      int value = 0;
      if (wanted[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) value = found ? found->type : 0;
      if (wanted[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) value = found ? found->device : -2;
      if (wanted[i] == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE) {
        const bool isExportable = found && found->isExportable;  // one byte, as drivers write it
        std::memcpy(values[i], &isExportable, 1);
        continue;
      }
      std::memcpy(values[i], &value, sizeof(value));
    }
    return self()->called("cuPointerGetAttributes");
  };
  table.cuMemHostAlloc = [](void** start, size_t bytes, unsigned flags) {
    const CUresult result = self()->called("cuMemHostAlloc");
    if (result != CUDA_SUCCESS) return result;
    self()->hostFlags = flags;
    self()->hostMemory_.emplace_back(bytes);
    *start = self()->hostMemory_.back().data();
    self()->memory[reinterpret_cast<CUdeviceptr>(*start)] = {.type = CU_MEMORYTYPE_HOST,
                                                             .bytes = bytes};
    return result;
  };
  table.cuMemGetAddressRange = [](CUdeviceptr* start, size_t* bytes, CUdeviceptr address) {
    const auto found = --self()->memory.upper_bound(address);
    *start = found->first;
    *bytes = found->second.bytes;
    return self()->called("cuMemGetAddressRange");
  };
  table.cuMemcpyAsync = [](CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream) {
    self()->copies.push_back({.to = to, .from = from, .bytes = bytes});
    return self()->called("cuMemcpyAsync");
  };
  table.cuStreamCreate = [](CUstream* stream, unsigned flags) {
    self()->streamFlags = flags;
    *stream = reinterpret_cast<CUstream>(++self()->lastHandle_);
    return self()->called("cuStreamCreate");
  };
  table.cuStreamDestroy = [](CUstream) { return self()->called("cuStreamDestroy"); };
  table.cuStreamSynchronize = [](CUstream) { return self()->called("cuStreamSynchronize"); };
  table.cuStreamIsCapturing = [](CUstream stream, CUstreamCaptureStatus* status) {
    *status = self()->capturing.contains(stream) ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                                 : CU_STREAM_CAPTURE_STATUS_NONE;
    return self()->called("cuStreamIsCapturing");
  };
  table.cuStreamWaitEvent = [](CUstream, CUevent, unsigned) {
    return self()->called("cuStreamWaitEvent");
  };
  table.cuStreamWriteValue32 = [](CUstream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    self()->writes.push_back({.address = address, .value = value, .flags = flags});
    return self()->called("cuStreamWriteValue32");
  };
  table.cuStreamWaitValue32 = [](CUstream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    self()->waits.push_back({.address = address, .value = value, .flags = flags});
    return self()->called("cuStreamWaitValue32");
  };
  table.cuEventCreate = [](CUevent* event, unsigned flags) {
    self()->eventFlags = flags;
    *event = reinterpret_cast<CUevent>(++self()->lastHandle_);
    return self()->called("cuEventCreate");
  };
  table.cuEventRecord = [](CUevent event, CUstream stream) {
    const CUresult result = self()->called("cuEventRecord");
    if (result == CUDA_SUCCESS) self()->recorded[event] = stream;
    return result;
  };
  table.cuEventQuery = [](CUevent event) {
    const CUresult result = self()->called("cuEventQuery");
    if (result != CUDA_SUCCESS) return result;
    const auto found = self()->recorded.find(event);
    const bool isAhead = found != self()->recorded.end() && self()->busy.contains(found->second);
    return isAhead ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
  };
  table.cuEventDestroy = [](CUevent event) {
    self()->recorded.erase(event);
    return self()->called("cuEventDestroy");
  };
  table.cuIpcGetMemHandle = [](CUipcMemHandle* handle, CUdeviceptr start) {
    std::memcpy(handle->reserved, &start, sizeof(start));
    return self()->called("cuIpcGetMemHandle");
  };
  // As the real driver: a second import of the same handle is the same address.
  table.cuIpcOpenMemHandle = [](CUdeviceptr* start, CUipcMemHandle handle, unsigned flags) {
    const CUresult result = self()->called("cuIpcOpenMemHandle");
    if (result != CUDA_SUCCESS) return result;
    self()->importFlags = flags;
    CUdeviceptr exported = 0;
    std::memcpy(&exported, handle.reserved, sizeof(exported));
    *start = exported + 0x1'0000'0000;
    ++self()->imports[*start];
    return result;
  };
  table.cuIpcCloseMemHandle = [](CUdeviceptr start) {
    --self()->imports[start];
    return self()->called("cuIpcCloseMemHandle");
  };
}

}  // namespace mooncake::testing
