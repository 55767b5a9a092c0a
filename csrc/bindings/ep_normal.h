#pragma once

#include <pybind11/pybind11.h>

#include "backend/experts/ep_buffer.h"

namespace mooncake {

// Binds the calls of the normal mode. `buffer`: the class that gets them.
void bindNormalMode(pybind11::module_& m, pybind11::class_<EpBuffer>& buffer);

}  // namespace mooncake
