#pragma once

#include <torch/csrc/utils/pybind.h>

namespace mooncake {

// _C.TransferEngine and what its calls take and return.
void bindTransfer(pybind11::module_& m);

}  // namespace mooncake
