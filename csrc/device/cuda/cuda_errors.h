#pragma once

#include <string>

#include "base/result.h"
#include "device/cuda/cuda_driver.h"

namespace mooncake {

// Translates an error of the driver. `subject` is the beginning of the text: the function and the
// device.
Error cudaError(const CudaDriver& driver, const std::string& subject, CUresult result);

// Whether the context of the device is of no use after this error.
bool losesContext(CUresult result);

}  // namespace mooncake
