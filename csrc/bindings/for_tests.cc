#include "bindings/fake_devices.h"

#include "device/fake/fake_devices.h"

namespace py = pybind11;

namespace mooncake {

void bindFakeDevices(py::module_& m) {
  m.def("fake_devices", [] { return py::capsule(&fakeDevices(), "mooncake.FakeDevices"); });
}

}  // namespace mooncake
