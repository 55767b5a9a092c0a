#include "device/cuda/open_cuda.h"

// For a build without cuda.h.
namespace mooncake {

Result<std::unique_ptr<Accelerator>> openCuda() {
  return Error{
      ErrorCode::kUnsupported,
      "this build knows no CUDA devices: cuda.h of CUDA 12 or later was not found when it "
      "was made. Install CUDA's headers, or name their folder in MOONCAKE_CUDA_INCLUDE_DIR, "
      "and build again"};
}

}  // namespace mooncake
