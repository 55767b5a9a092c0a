#pragma once

#include <torch/csrc/utils/pybind.h>

namespace mooncake {

// _C.EpBuffer and what its calls return.
void bindEp(pybind11::module_& m);

}  // namespace mooncake
