#include "device/cuda/cuda_scope.h"

namespace mooncake {

CudaScope::CudaScope(CudaContexts& contexts, int device, CUcontext context)
    : driver_(contexts.driver()) {
  CUcontext current = nullptr;
  status_ = contexts.check("cuCtxGetCurrent", device, driver_.cuCtxGetCurrent(&current));
  if (!status_.ok()) return;
  if (current != context) {
    status_ = contexts.check("cuCtxPushCurrent", device, driver_.cuCtxPushCurrent(context));
    if (!status_.ok()) return;
    hasPushed_ = true;
  }
  status_ = contexts.check("cuThreadExchangeStreamCaptureMode", device,
                           driver_.cuThreadExchangeStreamCaptureMode(&mode_));
  hasExchanged_ = status_.ok();
}

CudaScope::~CudaScope() {
  if (hasExchanged_) driver_.cuThreadExchangeStreamCaptureMode(&mode_);
  CUcontext popped = nullptr;
  if (hasPushed_) driver_.cuCtxPopCurrent(&popped);
}

}  // namespace mooncake
