#include "device/cuda/cuda_errors.h"

namespace mooncake {
namespace {

// Errors for which the oldest cuda.h that this library is built with, of CUDA 12.0, has no names.
constexpr int kCallRequiresNewerDriver = 36, kContained = 226, kTensorMemoryLeak = 721;

ErrorCode codeOf(CUresult result) {
  switch (static_cast<int>(result)) {
    case CUDA_ERROR_OUT_OF_MEMORY:
    case CUDA_ERROR_TOO_MANY_PEERS:
      return ErrorCode::kExhausted;
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_STUB_LIBRARY:
    case kCallRequiresNewerDriver:
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_PEER_ACCESS_UNSUPPORTED:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
    case CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE:
      return ErrorCode::kUnsupported;
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_HANDLE:
    case CUDA_ERROR_INVALID_DEVICE:
    case CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES:
    case CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE:
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
    case CUDA_ERROR_STREAM_CAPTURE_MERGE:
    case CUDA_ERROR_STREAM_CAPTURE_UNMATCHED:
    case CUDA_ERROR_STREAM_CAPTURE_UNJOINED:
    case CUDA_ERROR_STREAM_CAPTURE_ISOLATION:
    case CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
    case CUDA_ERROR_CAPTURED_EVENT:
    case CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD:
      return ErrorCode::kInvalidArgument;
    default:
      return ErrorCode::kSystem;
  }
}

}  // namespace

Error cudaError(const CudaDriver& driver, const std::string& subject, CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  std::string message = subject + ": ";
  // A driver may not know the number of an error that a newer one has sent.
  if (driver.cuGetErrorName(result, &name) == CUDA_SUCCESS && name != nullptr) {
    message += name;
  } else {
    message += "error " + std::to_string(static_cast<int>(result));
  }
  if (driver.cuGetErrorString(result, &text) == CUDA_SUCCESS && text != nullptr)
    message += std::string(" (") + text + ")";
  if (result == CUDA_ERROR_STUB_LIBRARY) {  // the stub does not even know its own error
    message +=
        ": libcuda.so.1 is the toolkit's stub, and no driver. Take its folder out of "
        "LD_LIBRARY_PATH";
  }
  if (static_cast<int>(result) == kCallRequiresNewerDriver)  // an old driver may not know its name
    message += ": the CUDA driver is too old for this call. Install a newer one";
  return {codeOf(result), std::move(message)};
}

bool losesContext(CUresult result) {
  switch (static_cast<int>(result)) {
    case CUDA_ERROR_DEINITIALIZED:  // the process ends
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case kContained:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case kTensorMemoryLeak:
    case CUDA_ERROR_MPS_CLIENT_TERMINATED:
    case CUDA_ERROR_EXTERNAL_DEVICE:
      return true;
    default:
      return false;
  }
}

}  // namespace mooncake
