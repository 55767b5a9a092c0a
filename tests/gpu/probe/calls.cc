#include <atomic>
#include <cstdio>
#include <functional>
#include <thread>
#include <unistd.h>

#include "check.h"
#include "clock.h"
#include "device.h"
#include "driver.h"
#include "kernels.h"
#include "parts.h"

namespace probe {
namespace {

constexpr double kWaitsMs = 400;  // a call that has not returned by then waits

// Work that does not end before it is told to: a kernel that spins, or a wait for a word.
class Blocker {
 public:
  explicit Blocker(bool isKernel) : isKernel_(isKernel) {}
  void begin() {
    store(word_, 0);
    if (isKernel_) {
      const SpinArguments arguments{.word = word_, .value = 1};
      launch(spin_, 32, stream_, &arguments);
    } else {
      awaitWord(stream_, word_, 1);
    }
  }
  void end() { store(word_, 1); }

 private:
  const bool isKernel_;
  const CUfunction spin_ = kernel("spin");
  const CUstream stream_ = makeStream();
  uint32_t* const word_ = pinnedWords(1);
};

// Results of calls that later calls use.
struct Made {
  void* pinned = nullptr;
  CUdeviceptr plain = 0;
  CUmemGenericAllocationHandle allocation = 0;
  CUmemGenericAllocationHandle imported = 0;
  int descriptor = -1;
  CUdeviceptr reserved = 0;
  CUstream stream = nullptr;
  CUevent event = nullptr;
  CUlibrary library = nullptr;
  CUfunction function = nullptr;
  CUgraph graph = nullptr;
  CUgraphExec replay = nullptr;
};

struct Call {
  const char* name;
  std::function<CUresult()> run;
};

CUresult asked(CUresult result) { return result == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : result; }

CUresult findKernel(Made& made) {
  CUkernel found = nullptr;
  int registers = 0;
  CUresult result = driver.cuLibraryGetKernel(&found, made.library, "tell");
  if (result == CUDA_SUCCESS) result = driver.cuKernelGetFunction(&made.function, found);
  if (result != CUDA_SUCCESS) return result;
  return driver.cuFuncGetAttribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, made.function);
}

CUresult captureWord(Made& made, uint32_t* word) {
  CUresult result = driver.cuStreamBeginCapture(made.stream, CU_STREAM_CAPTURE_MODE_RELAXED);
  if (result != CUDA_SUCCESS) return result;
  result = driver.cuStreamWriteValue32(made.stream, addressOf(word), 1, 0);
  const CUresult ended = driver.cuStreamEndCapture(made.stream, &made.graph);
  return result == CUDA_SUCCESS ? ended : result;
}

CUresult describe(CUdeviceptr address) {
  uint64_t type = 0;
  CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE};
  void* values[] = {&type};
  return driver.cuPointerGetAttributes(1, wanted, values, address);
}

void run(const Call& call, Blocker& blocker, const char* blockerName) {
  std::atomic<int> result{-1};
  const auto begin = Clock::now();
  double took = 0;
  std::thread thread([&] {
    useContext();
    const CUresult ended = call.run();
    took = millisecondsSince(begin);
    result = int(ended);
  });
  while (result < 0 && millisecondsSince(begin) < kWaitsMs) std::this_thread::yield();
  const bool waits = result < 0;
  if (waits) blocker.end();
  thread.join();
  const char* const name = nameOf(CUresult(result.load()));
  if (waits) {
    std::printf("[calls] %s: %-34s WAITS (%s)\n", blockerName, call.name, name);
    CHECKED(driver.cuCtxSynchronize());
    blocker.begin();
  } else {
    std::printf("[calls] %s: %-34s %.2f ms (%s)\n", blockerName, call.name, took, name);
  }
}

}  // namespace

void calls(bool isKernel) {
  openDevice();
  Blocker blocker(isKernel);
  Made made;
  const CUmemAllocationProp properties = sharedProperties();
  const CUmemAccessDesc access = sharedAccess();
  uint32_t* const words = pinnedWords(1);
  const TellArguments tellArguments{.word = words, .value = 1};
  CHECKED(driver.cuCtxSynchronize());
  blocker.begin();
  // The order matters: a call uses the results of the calls before it.
  const Call all[] = {
      {"cuMemHostAlloc of 64 KiB",
       [&] {
         return driver.cuMemHostAlloc(&made.pinned, 64 << 10,
                                      CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
       }},
      {"cuMemAlloc of 4 MiB", [&] { return driver.cuMemAlloc(&made.plain, 4 << 20); }},
      {"cuMemCreate",
       [&] { return driver.cuMemCreate(&made.allocation, kSharedBytes, &properties, 0); }},
      {"cuMemExportToShareableHandle",
       [&] {
         return driver.cuMemExportToShareableHandle(&made.descriptor, made.allocation,
                                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
       }},
      {"cuMemImportFromShareableHandle",
       [&] {
         return driver.cuMemImportFromShareableHandle(
             &made.imported, reinterpret_cast<void*>(intptr_t(made.descriptor)),
             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
       }},
      {"cuMemAddressReserve",
       [&] { return driver.cuMemAddressReserve(&made.reserved, kSharedBytes, 0, 0, 0); }},
      {"cuMemMap",
       [&] { return driver.cuMemMap(made.reserved, kSharedBytes, 0, made.allocation, 0); }},
      {"cuMemSetAccess",
       [&] { return driver.cuMemSetAccess(made.reserved, kSharedBytes, &access, 1); }},
      {"cuStreamCreate",
       [&] { return driver.cuStreamCreate(&made.stream, CU_STREAM_NON_BLOCKING); }},
      {"cuEventCreate", [&] { return driver.cuEventCreate(&made.event, CU_EVENT_DISABLE_TIMING); }},
      {"cuEventRecord", [&] { return driver.cuEventRecord(made.event, made.stream); }},
      {"cuEventQuery", [&] { return asked(driver.cuEventQuery(made.event)); }},
      {"cuPointerGetAttributes", [&] { return describe(made.plain); }},
      {"cuMemcpyAsync from pinned memory",
       [&] { return driver.cuMemcpyAsync(made.plain, addressOf(made.pinned), 4096, made.stream); }},
      {"cuStreamSynchronize of an idle one",
       [&] { return driver.cuStreamSynchronize(made.stream); }},
      {"cuLibraryLoadData",
       [&] {
         return driver.cuLibraryLoadData(&made.library, image(), nullptr, nullptr, 0, nullptr,
                                         nullptr, 0);
       }},
      {"cuKernelGetFunction, cuFuncGetAttribute", [&] { return findKernel(made); }},
      {"cuOccupancyMaxActiveBlocks...",
       [&] {
         int blocks = 0;
         return driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, made.function, 32, 0);
       }},
      {"cuLaunchKernel, the first of its kernel",
       [&] {
         void* parameters[] = {const_cast<TellArguments*>(&tellArguments)};
         return driver.cuLaunchKernel(made.function, 1, 1, 1, 32, 1, 1, 0, made.stream, parameters,
                                      nullptr);
       }},
      {"cuStreamBeginCapture ... EndCapture", [&] { return captureWord(made, words); }},
      {"cuGraphInstantiate",
       [&] { return driver.cuGraphInstantiate(&made.replay, made.graph, 0); }},
      {"cuGraphLaunch", [&] { return driver.cuGraphLaunch(made.replay, made.stream); }},
      {"cuGraphExecDestroy", [&] { return driver.cuGraphExecDestroy(made.replay); }},
      {"cuGraphDestroy", [&] { return driver.cuGraphDestroy(made.graph); }},
      {"cuEventDestroy", [&] { return driver.cuEventDestroy(made.event); }},
      {"cuStreamDestroy", [&] { return driver.cuStreamDestroy(made.stream); }},
      {"cuMemUnmap", [&] { return driver.cuMemUnmap(made.reserved, kSharedBytes); }},
      {"cuMemAddressFree", [&] { return driver.cuMemAddressFree(made.reserved, kSharedBytes); }},
      {"cuMemRelease", [&] { return driver.cuMemRelease(made.allocation); }},
      {"cuMemFree", [&] { return driver.cuMemFree(made.plain); }},
      {"cuMemFreeHost", [&] { return driver.cuMemFreeHost(made.pinned); }},
      {"cuCtxSynchronize, which must wait", [&] { return driver.cuCtxSynchronize(); }},
  };
  for (const Call& call : all) run(call, blocker, isKernel ? "kernel" : "word");
  blocker.end();
  CHECKED(driver.cuCtxSynchronize());
  ::close(made.descriptor);
}

}  // namespace probe
