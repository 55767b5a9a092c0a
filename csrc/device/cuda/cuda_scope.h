#pragma once

#include "base/result.h"
#include "device/cuda/cuda_contexts.h"

namespace mooncake {

// Makes a context the thread's current one, and lets the thread call the driver while another one
// captures a graph: otherwise an allocation here would spoil the capture. Undoes both at its end.
class CudaScope {
 public:
  CudaScope(CudaContexts& contexts, int device, CUcontext context);
  ~CudaScope();
  CudaScope(const CudaScope&) = delete;
  CudaScope& operator=(const CudaScope&) = delete;

  const Status& status() const { return status_; }

 private:
  const CudaDriver& driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool hasExchanged_ = false;
  bool hasPushed_ = false;
  Status status_;
};

// Calls the driver with `context`, or returns the error of it. `function` is the name for errors.
template <typename Call>
Status callIn(const Result<CUcontext>& context, CudaContexts& contexts, const char* function,
              int device, Call call) {
  if (!context.ok()) return context.error();
  const CudaScope scope(contexts, device, *context);
  MOONCAKE_TRY(scope.status());
  return contexts.check(function, device, call());
}

}  // namespace mooncake
