#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <gtest/gtest.h>
#include <map>
#include <set>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "device/cuda/cuda_driver.h"
#include "kernels/kernel_id.h"

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
  struct Launch {
    CUfunction function = nullptr;
    unsigned grid = 0, block = 0, shared = 0;
    CUstream stream = nullptr;
    bool isCooperative = false;
    std::vector<std::byte> arguments;
  };
  // Memory of cuMemCreate(). It lives while `users` is not 0: a handle, or a mapping.
  struct Shared {
    size_t bytes = 0;
    int device = 0;
    int users = 0;
    bool isForCards = false;
  };
  struct Range {
    size_t bytes = 0;
    CUmemGenericAllocationHandle memory = 0;  // 0: only reserved
    int device = -1;                          // that may use it
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
  // Of functions that fail. A driver may be newer than CUresult.
  std::map<std::string, int> results;
  int version = 13000;                 // of CUDA, 1000 * major + 10 * minor
  std::set<std::string> missing;       // functions that symbol() does not find
  std::set<std::string> needsContext;  // functions that fail if no context is current
  std::set<int> unnamed = {4711};      // errors that the driver does not know
  std::map<CUdeviceptr, Memory> memory;
  int greatestPriority = -5;  // of streams
  int streamPriority = 0;     // of the last stream
  std::set<CUstream> capturing;
  size_t graphNodes = 2;                 // of each graph
  std::set<CUstream> busy;               // events that are recorded on these do not happen
  std::map<CUevent, CUstream> recorded;  // the last stream of each event that lives
  std::map<CUdeviceptr, int> imports;
  std::map<CUdevice_attribute, int> attributes = {
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
      {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1}};
  std::set<CUdevice_attribute> unknownAttributes;  // of a later driver
  std::set<std::pair<int, int>> peers;             // devices that reach each other's memory
  const void* image = nullptr;                     // that was loaded
  std::map<CUfunction, int> sharedLimits;          // dynamic shared memory that was allowed
  std::vector<Launch> launches;
  std::map<CUmemGenericAllocationHandle, Shared> shared;
  std::map<CUdeviceptr, Range> ranges;
  std::vector<std::string> calls;  // "cuMemcpyAsync in 0": context of device 0; "-": none
  std::vector<Copy> copies;
  std::vector<Word> writes, waits;
  unsigned eventFlags = 0, streamFlags = 0, hostFlags = 0, importFlags = 0;

  // Returns the address of the function that the driver's library has under this name, or nullptr.
  void* symbol(const std::string& name) const {
    if (missing.contains(name)) return nullptr;
      // Through a second macro, a name becomes a text with its version.
#define MOONCAKE_SCRIPTED_TEXT(name) #name
#define MOONCAKE_SCRIPTED_SYMBOL(function) \
  if (name == MOONCAKE_SCRIPTED_TEXT(function)) return reinterpret_cast<void*>(table.function);
    MOONCAKE_CUDA_FUNCTIONS(MOONCAKE_SCRIPTED_SYMBOL)
#undef MOONCAKE_SCRIPTED_SYMBOL
#undef MOONCAKE_SCRIPTED_TEXT
    return nullptr;
  }

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
    if (found != results.end()) return static_cast<CUresult>(found->second);
    return stack.empty() && needsContext.contains(function) ? CUDA_ERROR_INVALID_CONTEXT
                                                            : CUDA_SUCCESS;
  }
  void fill();
  void fillKernels();
  void fillSharedMemory();
  void drop(CUmemGenericAllocationHandle handle) {
    if (--shared[handle].users == 0) shared.erase(handle);
  }

  std::vector<std::vector<std::byte>> hostMemory_;
  uintptr_t lastHandle_ = 0x100;
};

inline void ScriptedDriver::fill() {
  fillKernels();
  fillSharedMemory();
  table.cuInit = [](unsigned) { return self()->called("cuInit"); };
  table.cuGetErrorName = [](CUresult error, const char** name) {
    *name = error == CUDA_ERROR_ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER";
    return self()->unnamed.contains(error) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
  };
  table.cuGetErrorString = [](CUresult error, const char** text) {
    *text = "as the driver says it";
    return self()->unnamed.contains(error) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
  };
  table.cuDeviceGet = [](CUdevice* device, int ordinal) {
    *device = ordinal;
    return self()->called("cuDeviceGet");
  };
  table.cuDeviceGetCount = [](int* count) {
    *count = self()->devices;
    return self()->called("cuDeviceGetCount");
  };
  table.cuDeviceGetAttribute = [](int* value, CUdevice_attribute attribute, CUdevice) {
    const CUresult result = self()->called("cuDeviceGetAttribute");
    if (self()->unknownAttributes.contains(attribute)) return CUDA_ERROR_INVALID_VALUE;
    *value = self()->attributes[attribute];
    return result;
  };
  table.cuDeviceGetName = [](char* name, int bytes, CUdevice) {
    std::snprintf(name, static_cast<size_t>(bytes), "Scripted GPU");
    return self()->called("cuDeviceGetName");
  };
  table.cuDriverGetVersion = [](int* version) {
    *version = self()->version;
    return self()->called("cuDriverGetVersion");
  };
  table.cuDeviceCanAccessPeer = [](int* can, CUdevice device, CUdevice peer) {
    *can = self()->peers.contains({device, peer});
    return self()->called("cuDeviceCanAccessPeer");
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
    const CUresult result = self()->called("cuPointerGetAttributes");
    if (result != CUDA_SUCCESS) return result;
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
    return result;
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
  table.cuCtxGetStreamPriorityRange = [](int* least, int* greatest) {
    if (least != nullptr) *least = 0;
    *greatest = self()->greatestPriority;
    return self()->called("cuCtxGetStreamPriorityRange");
  };
  table.cuStreamCreateWithPriority = [](CUstream* stream, unsigned flags, int priority) {
    self()->streamFlags = flags;
    self()->streamPriority = priority;
    *stream = reinterpret_cast<CUstream>(++self()->lastHandle_);
    return self()->called("cuStreamCreateWithPriority");
  };
  table.cuStreamDestroy = [](CUstream) { return self()->called("cuStreamDestroy"); };
  table.cuStreamSynchronize = [](CUstream) { return self()->called("cuStreamSynchronize"); };
  table.cuStreamIsCapturing = [](CUstream stream, CUstreamCaptureStatus* status) {
    *status = self()->capturing.contains(stream) ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                                 : CU_STREAM_CAPTURE_STATUS_NONE;
    return self()->called("cuStreamIsCapturing");
  };
  table.cuStreamBeginCapture = [](CUstream stream, CUstreamCaptureMode) {
    self()->capturing.insert(stream);
    return self()->called("cuStreamBeginCapture");
  };
  table.cuStreamEndCapture = [](CUstream stream, CUgraph* graph) {
    self()->capturing.erase(stream);
    const CUresult result = self()->called("cuStreamEndCapture");
    *graph = result == CUDA_SUCCESS ? reinterpret_cast<CUgraph>(++self()->lastHandle_) : nullptr;
    return result;
  };
  table.cuGraphGetNodes = [](CUgraph, CUgraphNode*, size_t* nodes) {
    *nodes = self()->graphNodes;
    return self()->called("cuGraphGetNodes");
  };
  table.cuGraphDestroy = [](CUgraph) { return self()->called("cuGraphDestroy"); };
  table.cuStreamWaitEvent = [](CUstream, CUevent, unsigned flags) {
    return self()->called(flags == CU_EVENT_WAIT_EXTERNAL ? "cuStreamWaitEvent external"
                                                          : "cuStreamWaitEvent");
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
  table.cuEventRecordWithFlags = [](CUevent, CUstream, unsigned flags) {
    return self()->called(flags == CU_EVENT_RECORD_EXTERNAL ? "cuEventRecordWithFlags external"
                                                            : "cuEventRecordWithFlags");
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

// A function is the number of its kernel in the library, and 0x1000 for each context.
inline void ScriptedDriver::fillKernels() {
  table.cuLibraryLoadData = [](CUlibrary* library, const void* code, CUjit_option*, void**,
                               unsigned, CUlibraryOption*, void**, unsigned) {
    const CUresult result = self()->called("cuLibraryLoadData");
    if (result == CUDA_SUCCESS) {
      self()->image = code;
      *library = reinterpret_cast<CUlibrary>(++self()->lastHandle_);
    }
    return result;
  };
  table.cuLibraryGetKernel = [](CUkernel* kernel, CUlibrary, const char* name) {
    uintptr_t number = 1;
    for (const char* known : kKernelNames) {
      if (std::strcmp(known, name) == 0) *kernel = reinterpret_cast<CUkernel>(number);
      ++number;
    }
    return self()->called("cuLibraryGetKernel");
  };
  table.cuKernelGetFunction = [](CUfunction* function, CUkernel kernel) {
    const CUresult result = self()->called("cuKernelGetFunction");
    *function =
        reinterpret_cast<CUfunction>(reinterpret_cast<uintptr_t>(kernel) +
                                     0x1000 * reinterpret_cast<uintptr_t>(self()->stack.back()));
    return result;
  };
  table.cuFuncGetAttribute = [](int* value, CUfunction_attribute attribute, CUfunction) {
    *value = attribute == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES ? 48 : -1;
    return self()->called("cuFuncGetAttribute");
  };
  table.cuFuncSetAttribute = [](CUfunction function, CUfunction_attribute attribute, int value) {
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
      self()->sharedLimits[function] = value;
    return self()->called("cuFuncSetAttribute");
  };
  // As many as have 2048 threads in all.
  table.cuOccupancyMaxActiveBlocksPerMultiprocessor = [](int* blocks, CUfunction, int threads,
                                                         size_t) {
    *blocks = 2048 / threads;
    return self()->called("cuOccupancyMaxActiveBlocksPerMultiprocessor");
  };
  table.cuLaunchKernelEx = [](const CUlaunchConfig* config, CUfunction function, void** parameters,
                              void** extra) {
    Launch launch{.function = function,
                  .grid = config->gridDimX * config->gridDimY * config->gridDimZ,
                  .block = config->blockDimX * config->blockDimY * config->blockDimZ,
                  .shared = config->sharedMemBytes,
                  .stream = config->hStream};
    for (unsigned i = 0; i < config->numAttrs; ++i) {
      if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
        launch.isCooperative = config->attrs[i].value.cooperative != 0;
    }
    if (parameters != nullptr || extra[0] != CU_LAUNCH_PARAM_BUFFER_POINTER ||
        extra[2] != CU_LAUNCH_PARAM_BUFFER_SIZE || extra[4] != CU_LAUNCH_PARAM_END)
      return CUDA_ERROR_INVALID_VALUE;
    const auto* const start = static_cast<const std::byte*>(extra[1]);
    launch.arguments.assign(start, start + *static_cast<const size_t*>(extra[3]));
    self()->launches.push_back(std::move(launch));
    return self()->called("cuLaunchKernelEx");
  };
}

// A descriptor's size is the number of the memory.
inline void ScriptedDriver::fillSharedMemory() {
  table.cuMemGetAllocationGranularity = [](size_t* bytes, const CUmemAllocationProp*,
                                           CUmemAllocationGranularity_flags) {
    *bytes = 0x1000;
    return self()->called("cuMemGetAllocationGranularity");
  };
  table.cuMemCreate = [](CUmemGenericAllocationHandle* handle, size_t bytes,
                         const CUmemAllocationProp* properties, unsigned long long) {
    const CUresult result = self()->called("cuMemCreate");
    if (result != CUDA_SUCCESS) return result;
    if (properties->requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
        properties->type != CU_MEM_ALLOCATION_TYPE_PINNED || bytes % 0x1000 != 0)
      return CUDA_ERROR_INVALID_VALUE;
    *handle = ++self()->lastHandle_;
    self()->shared[*handle] = {.bytes = bytes,
                               .device = properties->location.id,
                               .users = 1,
                               .isForCards = properties->allocFlags.gpuDirectRDMACapable != 0};
    return result;
  };
  table.cuMemRelease = [](CUmemGenericAllocationHandle handle) {
    self()->drop(handle);
    return self()->called("cuMemRelease");
  };
  table.cuMemAddressReserve = [](CUdeviceptr* start, size_t bytes, size_t, CUdeviceptr,
                                 unsigned long long) {
    const CUresult result = self()->called("cuMemAddressReserve");
    if (result != CUDA_SUCCESS) return result;
    *start = 0x70'0000'0000 + (++self()->lastHandle_ << 24);
    self()->ranges[*start] = {.bytes = bytes};
    return result;
  };
  table.cuMemAddressFree = [](CUdeviceptr start, size_t bytes) {
    const CUresult result = self()->called("cuMemAddressFree");
    const auto found = self()->ranges.find(start);
    if (found == self()->ranges.end() || found->second.bytes != bytes || found->second.memory != 0)
      return CUDA_ERROR_INVALID_VALUE;
    self()->ranges.erase(found);
    return result;
  };
  table.cuMemMap = [](CUdeviceptr start, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                      unsigned long long) {
    const CUresult result = self()->called("cuMemMap");
    if (result != CUDA_SUCCESS) return result;
    if (self()->shared[handle].bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
    ++self()->shared[handle].users;
    self()->ranges[start].memory = handle;
    return result;
  };
  table.cuMemUnmap = [](CUdeviceptr start, size_t bytes) {
    const CUresult result = self()->called("cuMemUnmap");
    Range& range = self()->ranges[start];
    if (range.bytes != bytes || range.memory == 0) return CUDA_ERROR_INVALID_VALUE;
    self()->drop(std::exchange(range.memory, 0));
    return result;
  };
  table.cuMemSetAccess = [](CUdeviceptr start, size_t, const CUmemAccessDesc* access, size_t) {
    const CUresult result = self()->called("cuMemSetAccess");
    if (result == CUDA_SUCCESS && access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
      self()->ranges[start].device = access->location.id;
    return result;
  };
  table.cuMemExportToShareableHandle = [](void* out, CUmemGenericAllocationHandle handle,
                                          CUmemAllocationHandleType, unsigned long long) {
    const CUresult result = self()->called("cuMemExportToShareableHandle");
    if (result != CUDA_SUCCESS) return result;
    const int file = ::memfd_create("scripted", MFD_CLOEXEC);
    EXPECT_EQ(::ftruncate(file, static_cast<off_t>(handle)), 0);
    std::memcpy(out, &file, sizeof(file));
    return result;
  };
  table.cuMemImportFromShareableHandle = [](CUmemGenericAllocationHandle* handle, void* file,
                                            CUmemAllocationHandleType) {
    const CUresult result = self()->called("cuMemImportFromShareableHandle");
    if (result != CUDA_SUCCESS) return result;
    struct stat info {};
    if (::fstat(static_cast<int>(reinterpret_cast<intptr_t>(file)), &info) != 0)
      return CUDA_ERROR_INVALID_VALUE;
    *handle = static_cast<CUmemGenericAllocationHandle>(info.st_size);
    ++self()->shared[*handle].users;
    return result;
  };
}

}  // namespace mooncake::testing
