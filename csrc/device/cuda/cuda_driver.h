#pragma once

#include <cuda.h>
#include <functional>
#include <string>

#include "base/result.h"

// cuda.h names the version of each function by a macro: cuMemFree is cuMemFree_v2. The macro below
// gives F these names.
#define MOONCAKE_CUDA_FUNCTIONS(F)     \
  F(cuInit)                            \
  F(cuGetErrorName)                    \
  F(cuGetErrorString)                  \
  F(cuDeviceGet)                       \
  F(cuDeviceGetCount)                  \
  F(cuDeviceGetAttribute)              \
  F(cuDeviceGetName)                   \
  F(cuDeviceCanAccessPeer)             \
  F(cuDriverGetVersion)                \
  F(cuDevicePrimaryCtxGetState)        \
  F(cuDevicePrimaryCtxRetain)          \
  F(cuCtxGetCurrent)                   \
  F(cuCtxGetDevice)                    \
  F(cuCtxPushCurrent)                  \
  F(cuCtxPopCurrent)                   \
  F(cuThreadExchangeStreamCaptureMode) \
  F(cuPointerGetAttributes)            \
  F(cuMemHostAlloc)                    \
  F(cuMemGetAddressRange)              \
  F(cuMemcpyAsync)                     \
  F(cuCtxGetStreamPriorityRange)       \
  F(cuStreamCreateWithPriority)        \
  F(cuStreamDestroy)                   \
  F(cuStreamSynchronize)               \
  F(cuStreamIsCapturing)               \
  F(cuStreamBeginCapture)              \
  F(cuStreamEndCapture)                \
  F(cuGraphGetNodes)                   \
  F(cuGraphDestroy)                    \
  F(cuStreamWaitEvent)                 \
  F(cuStreamWriteValue32)              \
  F(cuStreamWaitValue32)               \
  F(cuEventCreate)                     \
  F(cuEventRecord)                     \
  F(cuEventRecordWithFlags)            \
  F(cuEventQuery)                      \
  F(cuEventDestroy)                    \
  F(cuIpcGetMemHandle)                 \
  F(cuIpcOpenMemHandle)                \
  F(cuIpcCloseMemHandle)               \
  F(cuMemGetAllocationGranularity)     \
  F(cuMemCreate)                       \
  F(cuMemRelease)                      \
  F(cuMemAddressReserve)               \
  F(cuMemAddressFree)                  \
  F(cuMemMap)                          \
  F(cuMemUnmap)                        \
  F(cuMemSetAccess)                    \
  F(cuMemExportToShareableHandle)      \
  F(cuMemImportFromShareableHandle)    \
  F(cuLibraryLoadData)                 \
  F(cuLibraryGetKernel)                \
  F(cuKernelGetFunction)               \
  F(cuFuncGetAttribute)                \
  F(cuFuncSetAttribute)                \
  F(cuLaunchKernelEx)                  \
  F(cuOccupancyMaxActiveBlocksPerMultiprocessor)

namespace mooncake {

// The functions of the driver that this library calls. They are found at run time, so that it loads
// on machines without a driver. Tests fill a table with functions of their own.
struct CudaDriver {
#define MOONCAKE_CUDA_FIELD(function) decltype(&::function) function = nullptr;
  MOONCAKE_CUDA_FUNCTIONS(MOONCAKE_CUDA_FIELD)
#undef MOONCAKE_CUDA_FIELD

  // Loads the library, which stays loaded. kUnsupported if it is not there or lacks a function.
  static Result<CudaDriver> load(const char* library = "libcuda.so.1");

  // Returns the address of a function in a driver, or nullptr if the driver lacks it.
  using Lookup = std::function<void*(const char* name)>;
  // Fills a table. kUnsupported if a function is missing. All of them are in every driver of CUDA 12,
  // so none is optional. The error names the missing functions and the driver's version.
  static Result<CudaDriver> find(const Lookup& lookup, const std::string& library);
};

}  // namespace mooncake
