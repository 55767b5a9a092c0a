#pragma once

#include <cuda.h>

// cuda.h names the version of a function by a macro: cuMemFree is cuMemFree_v2. The macro below
// gives F these names.
#define PROBE_FUNCTIONS(F)                       \
  F(cuInit)                                      \
  F(cuGetErrorName)                              \
  F(cuDriverGetVersion)                          \
  F(cuDeviceGet)                                 \
  F(cuDeviceGetName)                             \
  F(cuDeviceGetAttribute)                        \
  F(cuDevicePrimaryCtxRetain)                    \
  F(cuCtxSetCurrent)                             \
  F(cuCtxGetCurrent)                             \
  F(cuCtxSynchronize)                            \
  F(cuCtxGetStreamPriorityRange)                 \
  F(cuThreadExchangeStreamCaptureMode)           \
  F(cuPointerGetAttribute)                       \
  F(cuPointerGetAttributes)                      \
  F(cuMemAlloc)                                  \
  F(cuMemFree)                                   \
  F(cuMemHostAlloc)                              \
  F(cuMemFreeHost)                               \
  F(cuMemcpyAsync)                               \
  F(cuMemcpyHtoD)                                \
  F(cuMemsetD8)                                  \
  F(cuMemCreate)                                 \
  F(cuMemRelease)                                \
  F(cuMemAddressReserve)                         \
  F(cuMemAddressFree)                            \
  F(cuMemMap)                                    \
  F(cuMemUnmap)                                  \
  F(cuMemSetAccess)                              \
  F(cuMemExportToShareableHandle)                \
  F(cuMemImportFromShareableHandle)              \
  F(cuIpcGetMemHandle)                           \
  F(cuIpcOpenMemHandle)                          \
  F(cuStreamCreate)                              \
  F(cuStreamCreateWithPriority)                  \
  F(cuStreamDestroy)                             \
  F(cuStreamQuery)                               \
  F(cuStreamSynchronize)                         \
  F(cuStreamWaitEvent)                           \
  F(cuStreamWriteValue32)                        \
  F(cuStreamWaitValue32)                         \
  F(cuStreamBeginCapture)                        \
  F(cuStreamEndCapture)                          \
  F(cuGraphGetNodes)                             \
  F(cuGraphInstantiate)                          \
  F(cuGraphLaunch)                               \
  F(cuGraphExecDestroy)                          \
  F(cuGraphDestroy)                              \
  F(cuEventCreate)                               \
  F(cuEventRecord)                               \
  F(cuEventRecordWithFlags)                      \
  F(cuEventQuery)                                \
  F(cuEventDestroy)                              \
  F(cuModuleLoadData)                            \
  F(cuModuleGetFunction)                         \
  F(cuLibraryLoadData)                           \
  F(cuLibraryGetKernel)                          \
  F(cuKernelGetFunction)                         \
  F(cuFuncGetAttribute)                          \
  F(cuOccupancyMaxActiveBlocksPerMultiprocessor) \
  F(cuLaunchKernel)

namespace probe {

// The driver's functions. They are found at run time, so that the program starts on a machine
// without a driver and says so.
struct Driver {
#define PROBE_FIELD(function) decltype(&::function) function = nullptr;
  PROBE_FUNCTIONS(PROBE_FIELD)
#undef PROBE_FIELD
};

extern Driver driver;

// Fills in `driver`. Returns nullptr, or the reason why that failed.
const char* loadDriver();

}  // namespace probe
