#include "device/cuda/cuda_contexts.h"

#include "base/log.h"
#include "device/cuda/cuda_errors.h"

namespace mooncake {

Result<std::unique_ptr<CudaContexts>> CudaContexts::make(const CudaDriver& driver) {
  std::unique_ptr<CudaContexts> made(new CudaContexts(driver));
  Lock lock(made->mutex_);
  MOONCAKE_TRY(made->find());
  return made;
}

Status CudaContexts::find() {
  int count = 0;
  MOONCAKE_TRY(check("cuInit", -1, driver_.cuInit(0)));
  MOONCAKE_TRY(check("cuDeviceGetCount", -1, driver_.cuDeviceGetCount(&count)));
  for (int device = 0; device < count; ++device) {
    CUdevice handle = 0;
    MOONCAKE_TRY(check("cuDeviceGet", -1, driver_.cuDeviceGet(&handle, device)));
    devices_.push_back({.handle = handle});
  }
  if (devices_.empty()) return {ErrorCode::kUnsupported, "the CUDA driver finds no device"};
  return {};
}

Status CudaContexts::checkProcess() const {
  if (!isForked()) return {};
  return {
      ErrorCode::kAborted,
      "cuda: the devices belong to the process that this one was forked from. Start the process "
      "anew (spawn) to use them"};
}

Status CudaContexts::checkUsable(int device) const {
  if (device < 0 || device >= count()) {
    return {ErrorCode::kInvalidArgument, "cuda: there is no device " + std::to_string(device) +
                                             "; the driver finds " + std::to_string(count())};
  }
  const Device& one = devices_[static_cast<size_t>(device)];
  if (one.lost.empty()) return {};
  return {ErrorCode::kSystem, "cuda: the context of device " + std::to_string(device) +
                                  " is lost, for good, since " + one.lost +
                                  ". Start the process anew"};
}

Result<bool> CudaContexts::isActive(int device) const {
  const Device& one = devices_[static_cast<size_t>(device)];
  if (one.context != nullptr) return true;
  unsigned flags = 0;
  int isOn = 0;
  MOONCAKE_TRY(failed("cuDevicePrimaryCtxGetState", device,
                      driver_.cuDevicePrimaryCtxGetState(one.handle, &flags, &isOn)));
  return isOn != 0;
}

Result<CUcontext> CudaContexts::retain(int device) {
  Device& one = devices_[static_cast<size_t>(device)];
  if (one.context == nullptr) {
    MOONCAKE_TRY(failed("cuDevicePrimaryCtxRetain", device,
                        driver_.cuDevicePrimaryCtxRetain(&one.context, one.handle)));
  }
  return one.context;
}

Result<CUcontext> CudaContexts::chosen(int device) {
  MOONCAKE_TRY(checkProcess());  // before the lock: another thread may have held it
  Lock lock(mutex_);
  MOONCAKE_TRY(checkUsable(device));
  return retain(device);
}

Result<CUcontext> CudaContexts::inUse(int device) {
  MOONCAKE_TRY(checkProcess());  // before the lock: another thread may have held it
  Lock lock(mutex_);
  MOONCAKE_TRY(checkUsable(device));
  const auto active = isActive(device);
  if (!active.ok()) return active.error();
  if (*active) return retain(device);
  return Error{ErrorCode::kInvalidArgument,
               "cuda: the program does not use device " + std::to_string(device) +
                   ", and no context is made on it. Choose it first (torch.cuda.set_device, and a "
                   "tensor on it)"};
}

Result<int> CudaContexts::anyInUse() {
  MOONCAKE_TRY(checkProcess());  // before the lock: another thread may have held it
  Lock lock(mutex_);
  CUcontext current = nullptr;
  MOONCAKE_TRY(failed("cuCtxGetCurrent", -1, driver_.cuCtxGetCurrent(&current)));
  if (current != nullptr) {
    CUdevice handle = 0;
    MOONCAKE_TRY(failed("cuCtxGetDevice", -1, driver_.cuCtxGetDevice(&handle)));
    for (int device = 0; device < count(); ++device) {
      if (devices_[static_cast<size_t>(device)].handle == handle) return device;
    }
  }
  for (int device = 0; device < count(); ++device) {
    const auto active = isActive(device);
    if (!active.ok()) return active.error();
    if (*active) return device;
  }
  return Error{ErrorCode::kInvalidArgument,
               "cuda: the program uses no device yet, and no context is made for it. Choose one "
               "first (torch.cuda.set_device, and a tensor on it)"};
}

Result<CUdevice> CudaContexts::handleOf(int device) {
  MOONCAKE_TRY(checkProcess());  // before the lock: another thread may have held it
  Lock lock(mutex_);
  MOONCAKE_TRY(checkUsable(device));
  return devices_[static_cast<size_t>(device)].handle;
}

Result<int> CudaContexts::attribute(CUdevice_attribute attribute, int device) {
  const auto handle = handleOf(device);
  if (!handle.ok()) return handle.error();
  int value = 0;
  MOONCAKE_TRY(failed("cuDeviceGetAttribute", device,
                      driver_.cuDeviceGetAttribute(&value, attribute, *handle)));
  return value;
}

Status CudaContexts::failed(const char* function, int device, CUresult result) const {
  if (result == CUDA_SUCCESS) return {};
  std::string subject = std::string("cuda: ") + function;
  if (device >= 0) subject += " on device " + std::to_string(device);
  return cudaError(driver_, subject, result);
}

Status CudaContexts::check(const char* function, int device, CUresult result) {
  Status status = failed(function, device, result);
  if (status.ok() || device < 0 || !losesContext(result)) return status;
  Lock lock(mutex_);
  Device& one = devices_[static_cast<size_t>(device)];
  if (one.lost.empty()) {
    one.lost = status.error().message;
    log(LogLevel::kError, "device", one.lost, ". The context of the device is lost, for good");
  }
  return checkUsable(device);
}

}  // namespace mooncake
