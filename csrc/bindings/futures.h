#pragma once

#include <torch/csrc/utils/pybind.h>

namespace mooncake {

// Binds the class of the futures that our works return to Python.
void bindFutures(pybind11::module_& m);

class BatchWork;
class CollectiveWork;
class DeviceWork;
class MessageWork;

pybind11::object futureOf(CollectiveWork& work);
pybind11::object futureOf(MessageWork& work);
pybind11::object futureOf(BatchWork& work);
pybind11::object futureOf(DeviceWork& work);

}  // namespace mooncake
