#include <c10/core/TensorImpl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "allocator.h"
#include "copy.h"
#include "deferred.h"
#include "gate.h"
#include "generator.h"
#include "kernels.h"
#include "streams.h"

// The Python module: all that no function of torch's reaches. A stream is its device and its number.
namespace fake_device {

namespace {

namespace py = pybind11;
using c10::DeviceIndex;
using c10::StreamId;

c10::Stream streamOf(DeviceIndex device, StreamId number) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), number);
}

void attachCapsule(const py::capsule& capsule) {
  void* const found = PyCapsule_GetPointer(capsule.ptr(), "mooncake.FakeDevices");
  if (found == nullptr) throw py::error_already_set();
  attach(static_cast<mooncake::FakeDevices*>(found));
  giveKernels(devices());
}

py::dict memoryStats(DeviceIndex device) {
  const auto stats = allocator().getDeviceStats(device);
  py::dict out;
  const auto add = [&](const char* name, const c10::CachingAllocator::Stat& stat) {
    out[py::str(std::string(name) + ".all.current")] = stat.current;
    out[py::str(std::string(name) + ".all.peak")] = stat.peak;
  };
  add("allocation", stats.allocation[0]);
  add("allocated_bytes", stats.allocated_bytes[0]);
  add("active", stats.active[0]);
  add("active_bytes", stats.active_bytes[0]);
  add("reserved_bytes", stats.reserved_bytes[0]);
  out["num_alloc_retries"] = stats.num_alloc_retries;
  out["num_ooms"] = stats.num_ooms;
  return out;
}

void seed(DeviceIndex device, uint64_t seed) {
  at::Generator& generator = defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
}

py::tuple randomState(DeviceIndex device) {
  at::Generator& generator = defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  return py::make_tuple(generator.current_seed(), generator.get_offset());
}

void setRandomState(DeviceIndex device, uint64_t seed, uint64_t offset) {
  at::Generator& generator = defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
  generator.set_offset(offset);
}

void beginGraph(DeviceIndex device, StreamId number) {
  const c10::Stream stream = streamOf(device, number);
  check(devices().beginCapture(nativeStream(stream)));
  allocator().beginGraph(stream);
}

uint64_t endGraph(DeviceIndex device, StreamId number) {
  const c10::Stream stream = streamOf(device, number);
  allocator().endGraph(stream);
  return valueOf(devices().endCapture(nativeStream(stream)));
}

void replayGraph(uint64_t graph, DeviceIndex device, StreamId number) {
  check(devices().replay(graph, nativeStream(streamOf(device, number))));
}

mooncake::ErrorCode codeOf(const std::string& name) {
  if (name == "system") return mooncake::ErrorCode::kSystem;
  if (name == "exhausted") return mooncake::ErrorCode::kExhausted;
  if (name == "unsupported") return mooncake::ErrorCode::kUnsupported;
  throw py::value_error("code: " + name + " is not system, exhausted or unsupported");
}

void inject(const std::string& call, uint64_t n, uint64_t times, const std::string& code) {
  check(devices().inject({.call = call, .n = n, .times = times, .code = codeOf(code)}));
}

PYBIND11_MODULE(_fake_device, m) {
  const py::call_guard<py::gil_scoped_release> unlocked;
  m.def("attach", &attachCapsule);
  m.def("current_device", &currentDevice);
  m.def("set_device", &setCurrentDevice);

  py::class_<Gate, std::shared_ptr<Gate>>(m, "Gate")
      .def(py::init([](DeviceIndex device, StreamId number) {
        return std::make_shared<Gate>(streamOf(device, number));
      }))
      .def("open", &Gate::open);

  m.def(
      "empty_cache", [] { allocator().emptyCache(); }, unlocked);
  m.def("memory_stats", &memoryStats);
  m.def("reset_peak_memory_stats", [](DeviceIndex device) { allocator().resetPeakStats(device); });

  m.def("seed", &seed);
  m.def("random_state", &randomState);
  m.def("set_random_state", &setRandomState);

  m.def("begin_graph", &beginGraph);
  m.def("end_graph", &endGraph);
  m.def("replay_graph", &replayGraph);

  m.def("inject", &inject, py::arg("call"), py::arg("n") = 1, py::arg("times") = 1,
        py::arg("code") = "system");
  m.def("callers", [] { return devices().callers(); });
  m.def("kernels_run", &kernelsRun);
  m.def("blocks_run", &blocksRun);
  m.def("lose_context", [] { devices().loseContext(); });
  m.def("slow_copies", &slowCopies);
  m.def("set_deferred", &setDeferred);
  m.def("hide_handles", &hideHandles);
  m.def("limit_memory", [](size_t bytes) { devices().limitMemory(bytes); });
}

}  // namespace

}  // namespace fake_device
