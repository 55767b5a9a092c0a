#include "bindings/capture.h"

#include <string>

#include <ATen/DeviceAccelerator.h>
#include <torch/csrc/utils/pybind.h>

#include "backend/device/accelerator_of.h"

namespace py = pybind11;

namespace mooncake {

void refuseCaptureOfConstruction(const char* why) {
  const auto type = at::getAccelerator();
  if (!type) return;
  // A device that the program does not use must not be initialised for this.
  const py::module_ torch = py::module_::import("torch");
  const std::string name = c10::DeviceTypeName(*type, /*lower_case=*/true);
  const py::object module = py::getattr(torch, name.c_str(), py::none());
  if (!py::hasattr(module, "is_initialized") || !module.attr("is_initialized")().cast<bool>())
    return;
  refuseCapture(at::accelerator::getCurrentStream(at::accelerator::getDeviceIndex()), why);
}

}  // namespace mooncake
