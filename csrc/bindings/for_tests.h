#pragma once

#include <torch/csrc/utils/pybind.h>

namespace mooncake {

// Binds _C.fake_devices(): a capsule "mooncake.FakeDevices" with the process's `FakeDevices*`, which
// is valid until the process ends. A build for tests has it; no released wheel does.
void bindFakeDevices(pybind11::module_& m);

}  // namespace mooncake
