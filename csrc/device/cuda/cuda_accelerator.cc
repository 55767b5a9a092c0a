#include "device/cuda/cuda_accelerator.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "device/cuda/cuda_scope.h"
#include "device/cuda/kernel_image.h"
#include "device/cuda/open_cuda.h"
#include "device/replay_event.h"

namespace mooncake {
namespace {

CUdeviceptr numberOf(const void* address) { return reinterpret_cast<CUdeviceptr>(address); }
CUstream handleOf(DeviceStream stream) { return static_cast<CUstream>(stream.handle); }

// The driver's knowledge of an address.
struct PointerAttributes {
  uint64_t memoryType = 0;  // 0: memory that the driver does not know
  uint64_t device = 0;
  uint64_t isExportable = 0;
  uint64_t allocation = 0;
};

// The driver writes 1 to 8 bytes of each value, so all of them begin as zero.
Status ask(CudaContexts& contexts, const void* address, PointerAttributes& found) {
  constexpr char kFunction[] = "cuPointerGetAttributes";
  std::array<CUpointer_attribute, 4> wanted = {
      CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
      CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, CU_POINTER_ATTRIBUTE_BUFFER_ID};
  std::array<void*, 4> values = {&found.memoryType, &found.device, &found.isExportable,
                                 &found.allocation};
  const auto query = [&] {
    return contexts.driver().cuPointerGetAttributes(wanted.size(), wanted.data(), values.data(),
                                                    numberOf(address));
  };
  const CUresult result = query();
  if (result != CUDA_ERROR_INVALID_CONTEXT) return contexts.check(kFunction, -1, result);
  // No context is current. If the program has none, the driver knows no memory.
  const auto device = contexts.anyInUse();
  if (device.ok()) return callIn(contexts.inUse(*device), contexts, kFunction, *device, query);
  return device.error().code == ErrorCode::kInvalidArgument ? Status() : device.status();
}

}  // namespace

class CudaAccelerator::Event final : public ReplayEvent {
 public:
  Event(CudaAccelerator& accelerator, int device, CUevent event)
      : accelerator_(accelerator), device_(device), event_(event) {}
  ~Event() override {
    // An error means that the context is lost, and the event with it.
    (void)accelerator_.runOn("cuEventDestroy", device_,
                             [&] { return accelerator_.driver_.cuEventDestroy(event_); });
  }

  Status record(DeviceStream stream) override {
    return accelerator_.run("cuEventRecord", stream, [&] {
      return accelerator_.driver_.cuEventRecord(event_, handleOf(stream));
    });
  }
  Status block(DeviceStream stream) override {
    return accelerator_.run("cuStreamWaitEvent", stream, [&] {
      return accelerator_.driver_.cuStreamWaitEvent(handleOf(stream), event_, 0);
    });
  }
  Result<bool> hasHappened() override {
    bool isAhead = false;
    MOONCAKE_TRY(accelerator_.runOn("cuEventQuery", device_, [&] {
      const CUresult result = accelerator_.driver_.cuEventQuery(event_);
      isAhead = result == CUDA_ERROR_NOT_READY;
      return isAhead ? CUDA_SUCCESS : result;
    }));
    return !isAhead;
  }
  Status recordInReplays(DeviceStream stream) override {
    return accelerator_.run("cuEventRecordWithFlags", stream, [&] {
      return accelerator_.driver_.cuEventRecordWithFlags(event_, handleOf(stream),
                                                         CU_EVENT_RECORD_EXTERNAL);
    });
  }
  Status blockInReplays(DeviceStream stream) override {
    return accelerator_.run("cuStreamWaitEvent", stream, [&] {
      return accelerator_.driver_.cuStreamWaitEvent(handleOf(stream), event_,
                                                    CU_EVENT_WAIT_EXTERNAL);
    });
  }

 private:
  CudaAccelerator& accelerator_;
  const int device_;
  const CUevent event_;
};

Result<std::unique_ptr<CudaAccelerator>> CudaAccelerator::make(const CudaDriver& driver,
                                                               std::span<const std::byte> kernels,
                                                               Result<GdrLibrary> gdr) {
  auto contexts = CudaContexts::make(driver);
  if (!contexts.ok()) return contexts.error();
  return std::unique_ptr<CudaAccelerator>(
      new CudaAccelerator(std::move(*contexts), kernels, std::move(gdr)));
}

CudaAccelerator::CudaAccelerator(std::unique_ptr<CudaContexts> contexts,
                                 std::span<const std::byte> kernels, Result<GdrLibrary> gdr)
    : contexts_(std::move(contexts)),
      driver_(contexts_->driver()),
      pinned_(*contexts_),
      kernels_(*contexts_, kernels),
      peers_(*contexts_, std::move(gdr)) {}

template <typename Call>
Status CudaAccelerator::run(const char* function, DeviceStream stream, Call call) {
  return callIn(contexts_->chosen(stream.device), *contexts_, function, stream.device, call);
}

template <typename Call>
Status CudaAccelerator::runOn(const char* function, int device, Call call) {
  return callIn(contexts_->inUse(device), *contexts_, function, device, call);
}

Result<std::string> CudaAccelerator::describe(int device) {
  if (device < 0) {
    int version = 0;
    MOONCAKE_TRY(contexts_->check("cuDriverGetVersion", -1, driver_.cuDriverGetVersion(&version)));
    return "driver for CUDA " + std::to_string(version / 1000) + "." +
           std::to_string(version % 1000 / 10);
  }
  const auto handle = contexts_->handleOf(device);
  if (!handle.ok()) return handle.error();
  std::array<char, 128> name{};
  MOONCAKE_TRY(contexts_->check("cuDeviceGetName", device,
                                driver_.cuDeviceGetName(name.data(), name.size() - 1, *handle)));
  const auto major = contexts_->attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
  if (!major.ok()) return major.error();
  const auto minor = contexts_->attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
  if (!minor.ok()) return minor.error();
  return std::string(name.data()) + ", sm_" + std::to_string(*major) + std::to_string(*minor);
}

Result<MemoryPlace> CudaAccelerator::placeOf(const void* address) {
  MOONCAKE_TRY(contexts_->checkProcess());
  PointerAttributes found;
  MOONCAKE_TRY(ask(*contexts_, address, found));
  if (found.memoryType == CU_MEMORYTYPE_HOST) return MemoryPlace{.kind = MemoryKind::kPinned};
  if (found.memoryType != CU_MEMORYTYPE_DEVICE) return MemoryPlace{};
  return MemoryPlace{.kind = MemoryKind::kDevice, .device = static_cast<int>(found.device)};
}

Result<std::span<std::byte>> CudaAccelerator::allocatePinned(size_t bytes) {
  return pinned_.allocate(bytes);
}

void CudaAccelerator::freePinned(std::span<std::byte> memory) { pinned_.free(memory); }

// A device without priorities has the range from 0 to 0.
Result<DeviceStream> CudaAccelerator::createStream(int device, StreamPriority priority) {
  int level = 0;
  if (priority == StreamPriority::kHigh) {
    MOONCAKE_TRY(runOn("cuCtxGetStreamPriorityRange", device,
                       [&] { return driver_.cuCtxGetStreamPriorityRange(nullptr, &level); }));
  }
  CUstream made = nullptr;
  // The program's default stream must not wait for it, and the other way round.
  MOONCAKE_TRY(runOn("cuStreamCreateWithPriority", device, [&] {
    return driver_.cuStreamCreateWithPriority(&made, CU_STREAM_NON_BLOCKING, level);
  }));
  return DeviceStream{.device = device, .handle = made};
}

void CudaAccelerator::destroyStream(DeviceStream stream) {
  // An error means that the context is lost, and the stream with it.
  (void)run("cuStreamDestroy", stream, [&] {
    pinned_.leave(stream);
    return driver_.cuStreamDestroy(handleOf(stream));
  });
}

Status CudaAccelerator::synchronize(DeviceStream stream) {
  return run("cuStreamSynchronize", stream,
             [&] { return driver_.cuStreamSynchronize(handleOf(stream)); });
}

Result<std::unique_ptr<DeviceEvent>> CudaAccelerator::createEvent(int device) {
  CUevent made = nullptr;
  MOONCAKE_TRY(runOn("cuEventCreate", device,
                     [&] { return driver_.cuEventCreate(&made, CU_EVENT_DISABLE_TIMING); }));
  return std::unique_ptr<DeviceEvent>(std::make_unique<Event>(*this, device, made));
}

Status CudaAccelerator::copy(DeviceStream stream, void* to, const void* from, size_t bytes) {
  return run("cuMemcpyAsync", stream, [&] {
    if (bytes == 0) return CUDA_SUCCESS;
    pinned_.use(to, stream);
    pinned_.use(from, stream);
    return driver_.cuMemcpyAsync(numberOf(to), numberOf(from), bytes, handleOf(stream));
  });
}

// The second version of the driver's functions, which the table has, works without a setting of the
// kernel module. Where a device lacks it they return kUnsupported.
bool CudaAccelerator::hasStreamWords(int device) const {
  return device >= 0 && device < deviceCount();
}

Status CudaAccelerator::writeWord(DeviceStream stream, StreamWord* word, uint32_t value) {
  return run("cuStreamWriteValue32", stream, [&] {
    pinned_.use(word, stream);
    // The default flag orders the store behind the stream's earlier ones, also for the host.
    return driver_.cuStreamWriteValue32(handleOf(stream), numberOf(word), value,
                                        CU_STREAM_WRITE_VALUE_DEFAULT);
  });
}

Status CudaAccelerator::awaitWord(DeviceStream stream, StreamWord* word, uint32_t value) {
  return run("cuStreamWaitValue32", stream, [&] {
    pinned_.use(word, stream);
    return driver_.cuStreamWaitValue32(handleOf(stream), numberOf(word), value,
                                       CU_STREAM_WAIT_VALUE_GEQ);
  });
}

// Drivers differ in whether a capture takes words of streams, and an error of the driver would spoil
// the program's capture. So the words are first recorded into a graph of ours, which never runs.
Status CudaAccelerator::checkRecordedWords(int device) {
  const auto memory = allocatePinned(2 * sizeof(StreamWord));
  if (!memory.ok()) return memory.error();
  const auto stream = createStream(device);
  const Status recorded = stream.ok()
                              ? recordWords(*stream, reinterpret_cast<StreamWord*>(memory->data()))
                              : stream.status();
  if (stream.ok()) destroyStream(*stream);
  freePinned(*memory);
  return recorded;
}

Status CudaAccelerator::recordWords(DeviceStream stream, StreamWord* word) {
  MOONCAKE_TRY(run("cuStreamBeginCapture", stream, [&] {
    return driver_.cuStreamBeginCapture(handleOf(stream), CU_STREAM_CAPTURE_MODE_RELAXED);
  }));
  Status recorded = writeWord(stream, word, 1);
  if (recorded.ok()) recorded = awaitWord(stream, word + 1, 1);
  CUgraph graph = nullptr;
  const Status ended = run("cuStreamEndCapture", stream,
                           [&] { return driver_.cuStreamEndCapture(handleOf(stream), &graph); });
  size_t nodes = 0;
  if (recorded.ok()) recorded = ended;
  if (recorded.ok()) {
    recorded = run("cuGraphGetNodes", stream,
                   [&] { return driver_.cuGraphGetNodes(graph, nullptr, &nodes); });
  }
  if (graph != nullptr)
    (void)run("cuGraphDestroy", stream, [&] { return driver_.cuGraphDestroy(graph); });
  if (recorded.ok() && nodes < 2)
    recorded = {ErrorCode::kUnsupported, "cuda: the driver leaves words of streams out of graphs"};
  return recorded;
}

CaptureMode CudaAccelerator::exchangeCaptureMode(CaptureMode mode) {
  constexpr CUstreamCaptureMode kModes[] = {CU_STREAM_CAPTURE_MODE_GLOBAL,
                                            CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                                            CU_STREAM_CAPTURE_MODE_RELAXED};
  CUstreamCaptureMode exchanged = kModes[size_t(mode)];
  if (driver_.cuThreadExchangeStreamCaptureMode(&exchanged) != CUDA_SUCCESS) return mode;
  return CaptureMode(std::ranges::find(kModes, exchanged) - std::begin(kModes));
}

Result<bool> CudaAccelerator::isCapturing(DeviceStream stream) {
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  MOONCAKE_TRY(run("cuStreamIsCapturing", stream,
                   [&] { return driver_.cuStreamIsCapturing(handleOf(stream), &capture); }));
  return capture != CU_STREAM_CAPTURE_STATUS_NONE;
}

Status CudaAccelerator::prepareKernels(int device) { return kernels_.prepare(device); }

Result<KernelRoom> CudaAccelerator::roomFor(const KernelLaunch& launch, int device) {
  return kernels_.roomFor(launch, device);
}

Status CudaAccelerator::launch(DeviceStream stream, const KernelLaunch& launch) {
  return kernels_.launch(stream, launch);
}

Result<ExportedMemory> CudaAccelerator::exportMemory(const void* address) {
  MOONCAKE_TRY(contexts_->checkProcess());
  PointerAttributes found;
  MOONCAKE_TRY(ask(*contexts_, address, found));
  if (found.memoryType != CU_MEMORYTYPE_DEVICE) {
    return Error{ErrorCode::kUnsupported,
                 "cuda: only memory of a device can be exported, and this is memory of the host"};
  }
  const int device = static_cast<int>(found.device);
  if (found.isExportable == 0) {
    return Error{
        ErrorCode::kUnsupported,
        "cuda: this memory of device " + std::to_string(device) +
            " cannot be mapped by other processes. It is managed, comes from a memory pool "
            "(cudaMallocAsync), or lies in expandable segments of PyTorch's allocator. "
            "Leave expandable_segments and backend:cudaMallocAsync out of "
            "PYTORCH_ALLOC_CONF"};
  }
  CUdeviceptr start = 0;
  size_t bytes = 0;
  MOONCAKE_TRY(runOn("cuMemGetAddressRange", device, [&] {
    return driver_.cuMemGetAddressRange(&start, &bytes, numberOf(address));
  }));
  CUipcMemHandle handle{};
  MOONCAKE_TRY(runOn("cuIpcGetMemHandle", device,
                     [&] { return driver_.cuIpcGetMemHandle(&handle, start); }));
  const uint64_t offset = numberOf(address) - start;
  return ExportedMemory{.handle = std::string(handle.reserved, sizeof(handle.reserved)),
                        .allocation = found.allocation,
                        .offset = offset,
                        .bytes = bytes - offset};
}

Result<void*> CudaAccelerator::importMemory(const ExportedMemory& memory, int device) {
  CUipcMemHandle handle{};
  if (memory.handle.size() != sizeof(handle.reserved)) {
    return Error{ErrorCode::kInvalidArgument,
                 "cuda: a handle of " + std::to_string(memory.handle.size()) + " bytes, not of " +
                     std::to_string(sizeof(handle.reserved)) + ", is none of exportMemory()"};
  }
  std::memcpy(handle.reserved, memory.handle.data(), sizeof(handle.reserved));
  CUdeviceptr start = 0;
  MOONCAKE_TRY(runOn("cuIpcOpenMemHandle", device, [&] {
    return driver_.cuIpcOpenMemHandle(&start, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  }));
  Lock lock(importsMutex_);
  Import& import = imports_[start];
  import.device = device;
  import.bytes = std::max<size_t>(import.bytes, memory.offset + memory.bytes);
  ++import.count;
  return reinterpret_cast<void*>(start + memory.offset);
}

Status CudaAccelerator::closeMemory(void* address) {
  CUdeviceptr start = 0;
  int device = 0;
  {
    Lock lock(importsMutex_);
    auto found = imports_.upper_bound(numberOf(address));
    if (found == imports_.begin() || numberOf(address) - (--found)->first >= found->second.bytes) {
      return {ErrorCode::kInvalidArgument,
              "cuda: no open memory is at this address of importMemory()"};
    }
    start = found->first;
    device = found->second.device;
    if (--found->second.count == 0) imports_.erase(found);
  }
  return runOn("cuIpcCloseMemHandle", device, [&] { return driver_.cuIpcCloseMemHandle(start); });
}

// The scope of the owner is enough: other ranks of the host read such bytes only after a kernel of
// the owner has seen the word and told them. Devices before Hopper keep no order, and drivers before
// 11.3 do not know the attribute.
bool CudaAccelerator::ordersCardWrites(int device) const {
  const auto scope =
      contexts_->attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, device);
  return scope.ok() && *scope >= CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER;
}

Result<std::unique_ptr<Accelerator>> openCuda() {
  const auto loaded = CudaDriver::load();
  if (!loaded.ok()) return loaded.error();
  static const CudaDriver driver = *loaded;
  auto made = CudaAccelerator::make(driver, kernelImage());
  if (!made.ok()) return made.error();
  return std::unique_ptr<Accelerator>(std::move(*made));
}

}  // namespace mooncake
