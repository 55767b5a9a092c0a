#include "bindings/for_tests.h"

#include <cstdint>
#include <string>

#include "base/failpoint.h"
#include "device/fake/fake_devices.h"

namespace py = pybind11;

namespace mooncake {

void bindForTests(py::module_& m) {
  m.def("fake_devices", [] { return py::capsule(&fakeDevices(), "mooncake.FakeDevices"); });
  m.def(
      "arm_failpoint",
      [](const std::string& name, uint32_t nth, bool stops) {
        armFailpoint(name, nth, stops ? FailpointAction::kStop : FailpointAction::kKill);
      },
      py::arg("name"), py::arg("nth"), py::arg("stops"));
}

}  // namespace mooncake
