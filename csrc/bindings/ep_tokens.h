#pragma once

#include <pybind11/pybind11.h>

#include "backend/ep_buffer.h"

namespace mooncake {

// The calls of the normal mode by kernels. `buffer`: the class that gets them.
void bindTokenKernels(pybind11::module_& m, pybind11::class_<EpBuffer>& buffer);

}  // namespace mooncake
