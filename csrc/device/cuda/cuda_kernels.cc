#include "device/cuda/cuda_kernels.h"

#include <string>

#include "device/cuda/cuda_scope.h"

namespace mooncake {

Status CudaKernels::checkImage() const {
  if (!image_.empty()) return {};
  return {
      ErrorCode::kUnsupported,
      "cuda: this build has no kernels, because nvcc of CUDA 12.8 or later was not found when it "
      "was made. Install CUDA's compiler, put nvcc into PATH, and build again"};
}

Status CudaKernels::prepare(int device) {
  MOONCAKE_TRY(contexts_.checkProcess());  // before the locks: another thread may have held them
  MOONCAKE_TRY(checkImage());
  Lock loading(loadMutex_);
  {
    Lock lock(mutex_);
    if (loaded_.contains(device)) return {};
  }
  const auto functions = loadAll(device);
  if (!functions.ok()) return functions.error();
  Lock lock(mutex_);
  loaded_[device] = *functions;
  return {};
}

Status CudaKernels::loadLibrary(int device) {
  if (library_ != nullptr) return {};
  return contexts_.check("cuLibraryLoadData", device,
                         contexts_.driver().cuLibraryLoadData(&library_, image_.data(), nullptr,
                                                              nullptr, 0, nullptr, nullptr, 0));
}

// The library alone brings no kernel to the device: the driver loads each with its function, and
// at the latest for an attribute of it.
Result<CudaKernels::Functions> CudaKernels::loadAll(int device) {
  const CudaDriver& driver = contexts_.driver();
  const auto context = contexts_.inUse(device);
  if (!context.ok()) return context.error();
  const CudaScope scope(contexts_, device, *context);
  MOONCAKE_TRY(scope.status());
  MOONCAKE_TRY(loadLibrary(device));
  Functions functions{};
  for (size_t i = 0; i < kKernelCount; ++i) {
    CUkernel kernel = nullptr;
    const std::string name = std::string(" of ") + kKernelNames[i];
    MOONCAKE_TRY(contexts_.check(("cuLibraryGetKernel" + name).c_str(), device,
                                 driver.cuLibraryGetKernel(&kernel, library_, kKernelNames[i])));
    MOONCAKE_TRY(contexts_.check(("cuKernelGetFunction" + name).c_str(), device,
                                 driver.cuKernelGetFunction(&functions[i], kernel)));
    MOONCAKE_TRY(raiseSharedLimit(functions[i], device));
  }
  return functions;
}

Status CudaKernels::raiseSharedLimit(CUfunction function, int device) {
  const CudaDriver& driver = contexts_.driver();
  const auto most =
      contexts_.attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device);
  if (!most.ok()) return most.error();
  int fixed = 0;
  MOONCAKE_TRY(contexts_.check(
      "cuFuncGetAttribute", device,
      driver.cuFuncGetAttribute(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)));
  return contexts_.check(
      "cuFuncSetAttribute", device,
      driver.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                *most - fixed));
}

Result<CUfunction> CudaKernels::find(KernelId kernel, int device) {
  MOONCAKE_TRY(contexts_.checkProcess());  // before the lock: another thread may have held it
  MOONCAKE_TRY(checkImage());
  Lock lock(mutex_);
  const auto found = loaded_.find(device);
  if (found != loaded_.end()) return found->second[static_cast<size_t>(kernel)];
  return Error{ErrorCode::kInvalidArgument,
               std::string("cuda: kernel ") + kernelName(kernel) + " is not loaded on device " +
                   std::to_string(device) + ". Call prepareKernels() ahead of the first launch"};
}

Result<KernelRoom> CudaKernels::roomFor(const KernelLaunch& launch, int device) {
  const auto function = find(launch.kernel, device);
  if (!function.ok()) return function.error();
  const auto multiprocessors =
      contexts_.attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
  if (!multiprocessors.ok()) return multiprocessors.error();
  KernelRoom room{.multiprocessors = *multiprocessors};
  MOONCAKE_TRY(callIn(contexts_.inUse(device), contexts_,
                      "cuOccupancyMaxActiveBlocksPerMultiprocessor", device, [&] {
                        return contexts_.driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                            &room.blocksEach, *function, static_cast<int>(launch.block),
                            launch.sharedBytes);
                      }));
  return room;
}

Status CudaKernels::launch(DeviceStream stream, const KernelLaunch& launch) {
  const auto function = find(launch.kernel, stream.device);
  if (!function.ok()) return function.error();
  CUlaunchAttribute cooperative{};
  cooperative.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
  cooperative.value.cooperative = 1;
  CUlaunchConfig config{};
  config.gridDimX = launch.grid;
  config.blockDimX = launch.block;
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = launch.sharedBytes;
  config.hStream = static_cast<CUstream>(stream.handle);
  config.attrs = &cooperative;
  config.numAttrs = launch.isCooperative ? 1 : 0;
  // With its size, so that the driver does not read beyond the struct.
  size_t bytes = launch.arguments.size();
  void* arguments[] = {CU_LAUNCH_PARAM_BUFFER_POINTER,
                       const_cast<std::byte*>(launch.arguments.data()), CU_LAUNCH_PARAM_BUFFER_SIZE,
                       &bytes, CU_LAUNCH_PARAM_END};
  const Status launched = callIn(
      contexts_.chosen(stream.device), contexts_, "cuLaunchKernelEx", stream.device,
      [&] { return contexts_.driver().cuLaunchKernelEx(&config, *function, nullptr, arguments); });
  if (launched.ok()) return {};
  return {launched.code(),
          std::string("kernel ") + kernelName(launch.kernel) + ": " + launched.error().message};
}

}  // namespace mooncake
