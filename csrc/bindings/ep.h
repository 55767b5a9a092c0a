#pragma once

#include <torch/csrc/utils/pybind.h>

namespace mooncake {

// Binds _C.EpBuffer and the classes of its results.
void bindEp(pybind11::module_& m);

}  // namespace mooncake
