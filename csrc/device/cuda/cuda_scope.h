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

}  // namespace mooncake
