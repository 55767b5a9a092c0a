#pragma once

#include <torch/csrc/utils/pybind.h>

namespace mooncake {

// Binds functions for tests. A build for tests has it; no released wheel does.
//
//   fake_devices()                       a capsule "mooncake.FakeDevices" with the process's
//                                        `FakeDevices*`, which is valid until the process ends
//   arm_failpoint(name, nth, stops)      kills this process at the nth pass, or stops it
void bindForTests(pybind11::module_& m);

}  // namespace mooncake
