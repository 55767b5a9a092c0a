#include "bindings/ep.h"

#include <functional>
#include <optional>
#include <span>
#include <tuple>

#include <ATen/ATen.h>
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "backend/arguments.h"
#include "backend/backend_env.h"
#include "backend/experts/ep_buffer.h"
#include "backend/mooncake_backend.h"
#include "base/log.h"
#include "base/thread.h"
#include "bindings/capture.h"
#include "bindings/ep_normal.h"
#include "bindings/transfer.h"
#include "ep/own_job.h"

namespace py = pybind11;

namespace mooncake {
namespace {

using Seconds = EpBuffer::Seconds;
using Exchange = std::function<std::vector<py::bytes>(py::bytes)>;
using MaybeTensor = std::optional<at::Tensor>;

// Results are tuples, not classes with properties: each property would cost one percent of a call
// with one token. Rows, scales, counts, sources, ranges.
using Dispatched = std::tuple<at::Tensor, MaybeTensor, at::Tensor, at::Tensor, at::Tensor, EpHandle,
                              std::shared_ptr<EpWork>>;
// The sums, and for each token whether a contribution is missing.
using Combined = std::tuple<at::Tensor, at::Tensor, std::shared_ptr<EpWork>>;

Bytes toBytes(const py::bytes& bytes) {
  const std::string text = bytes;
  const auto view = std::as_bytes(std::span(text));
  return {view.begin(), view.end()};
}

py::bytes toPython(ByteView bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Makes the buffer's destructor safe on every thread. The last tensor in the buffer's memory may be
// released with Python's lock held: then the lock is given up, because the buffer's thread may be
// waiting for it. Or it may be released on the buffer's own thread, which cannot join itself: then
// another thread destroys the buffer.
std::shared_ptr<ep::Buffer> withPython(std::shared_ptr<ep::Buffer> buffer) {
  ep::Buffer* const raw = buffer.get();
  return {raw, [buffer = std::move(buffer)](ep::Buffer*) mutable {
            if (buffer->isOwnThread()) {
              // If no thread can be started, the buffer is leaked until the process ends.
              auto* const ending = new std::shared_ptr(std::move(buffer));
              auto thread = startThread("mooncake-end", [ending] { delete ending; });
              if (thread.ok()) return thread->detach();
              return mooncake::log(mooncake::LogLevel::kError, "ep", thread.error().message);
            }
            std::optional<py::gil_scoped_release> unlocked;
            if (PyGILState_Check()) unlocked.emplace();
            buffer.reset();
          }};
}

const MooncakeBackend& backendOfOurs(const c10d::Backend& backend) {
  const auto* ours = dynamic_cast<const MooncakeBackend*>(&backend);
  if (!ours) throw py::type_error("backend: not one of mooncake's");
  return *ours;
}

// The ranks exchange keys and addresses through the Python function.
ep::ByteExchange exchangeBy(const Exchange& exchange) {
  return [&exchange](const Bytes& mine) -> Result<std::vector<Bytes>> {
    py::gil_scoped_acquire locked;
    try {
      std::vector<Bytes> all;
      for (const py::bytes& one : exchange(toPython(mine))) all.push_back(toBytes(one));
      return all;
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;  // Ctrl-C
      return Error{ErrorCode::kSystem,
                   std::string("the exchange of addresses failed: ") + error.what()};
    }
  };
}

// An engine that cannot be lent is an error of all ranks.
void lend(const InnerTransferEngine& engine, ep::OwnJobOptions& job) {
  try {
    job.lent = lendForJob(engine, job.lentKey);
  } catch (const py::value_error& error) {
    job.ready = {ErrorCode::kInvalidArgument, error.what()};
  }
}

std::unique_ptr<EpBuffer> makeBuffer(
    int rank, int size, size_t bytes, Seconds timeout,
    const std::optional<c10::intrusive_ptr<c10d::Backend>>& backend, const Exchange& exchange,
    const std::string& routeHint, bool renormalizes, bool raises,
    const std::optional<InnerTransferEngine>& engine, const std::vector<std::string>& devices,
    bool hasResults, const EpBuffer* beside, size_t bytesBeside) {
  refuseCaptureOfConstruction("the construction of a Buffer cannot be recorded");
  const Deadline deadline = EpBuffer::deadlineIn(timeout);
  const auto read = BackendEnv::read();
  const BackendEnv env = exchange && !beside && !read.ok() ? BackendEnv() : orThrow(read);
  std::unique_ptr<Group> group;
  std::shared_ptr<EpKernels> kernels;
  std::shared_ptr<TokenKernels> tokens;
  const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(timeout);
  if (backend) {
    const MooncakeBackend& ours = backendOfOurs(**backend);
    py::gil_scoped_release unlocked;
    group = makeEpGroup(ours, size, raises, deadline);
    if (env.epKernels && !raises && hasResults) {
      kernels = makeEpKernels(
          ours, bytes,
          {.timeout = limit, .renormalizes = renormalizes, .blocks = env.blockingWait});
    } else if (env.epKernels && !raises) {
      tokens = makeTokenKernels(ours, bytes, {.timeout = limit, .blocks = env.blockingWait});
    }
  } else if (exchange) {
    ep::OwnJobOptions job{.rank = rank,
                          .size = size,
                          .bytes = bytes + bytesBeside,
                          .raises = raises,
                          .routeHint = routeHint,
                          .devices = devices,
                          .ready = read.status()};
    if (engine) lend(*engine, job);
    py::gil_scoped_release unlocked;
    group = orThrow(beside ? ep::groupWithin(beside->buffer()->group(), job, deadline)
                           : ep::beginOwnJob(job, exchangeBy(exchange), deadline));
  } else {
    throw py::value_error("either a backend or an exchange is needed");
  }
  py::gil_scoped_release unlocked;
  auto buffer = orThrow(ep::Buffer::create(std::move(group), bytes, deadline, hasResults));
  return std::make_unique<EpBuffer>(
      withPython(std::move(buffer)),
      EpBuffer::Options{.timeout = timeout,
                        .renormalizes = renormalizes,
                        .raises = raises,
                        .streams = {.words = env.streamWords && env.epStreamWords,
                                    .pinnedCache = env.pinnedCache},
                        .blocks = env.blockingWait,
                        .kernels = std::move(kernels),
                        .tokens = std::move(tokens)});
}

using Ends = EpBuffer::Ends;

Ends endsOf(bool inBackground, bool isHooked) {
  return isHooked ? Ends::kByHook : inBackground ? Ends::kByEvent : Ends::kAtOnce;
}

Dispatched dispatch(EpBuffer& buffer, const at::Tensor& x, const at::Tensor& topk,
                    int64_t maxTokens, int numExperts, bool usesFp8, bool roundsScale,
                    bool packsScales, const MaybeTensor& activeRanks, int64_t timeoutMicros,
                    bool inBackground, bool isHooked, const MaybeTensor& addedCounts,
                    const MaybeTensor& waits, bool keepsRows) {
  std::optional<py::gil_scoped_release> unlocked(std::in_place);
  auto made = buffer.dispatch({.x = x,
                               .topk = topk,
                               .maxTokens = maxTokens,
                               .numExperts = numExperts,
                               .usesFp8 = usesFp8,
                               .roundsScale = roundsScale,
                               .packsScales = packsScales,
                               .activeRanks = activeRanks,
                               .timeoutMicros = timeoutMicros,
                               .addedCounts = addedCounts,
                               .waits = waits,
                               .keepsRows = keepsRows});
  auto work = buffer.submit(std::move(made.call), endsOf(inBackground, isHooked));
  unlocked.reset();
  return {std::move(made.rows),    std::move(made.scales), std::move(made.counts),
          std::move(made.sources), std::move(made.ranges), std::move(made.handle),
          std::move(work)};
}

Combined combine(EpBuffer& buffer, const at::Tensor& x, const at::Tensor& topk,
                 const at::Tensor& weights, const EpHandle& handle, bool usesLogfmt, bool zeroCopy,
                 const MaybeTensor& out, const MaybeTensor& activeRanks, int64_t timeoutMicros,
                 bool inBackground, bool isHooked, const MaybeTensor& waits) {
  std::optional<py::gil_scoped_release> unlocked(std::in_place);
  auto made = buffer.combine({.x = x,
                              .topk = topk,
                              .weights = weights,
                              .handle = handle,
                              .usesLogfmt = usesLogfmt,
                              .zeroCopy = zeroCopy,
                              .out = out,
                              .activeRanks = activeRanks,
                              .timeoutMicros = timeoutMicros,
                              .waits = waits});
  auto work = buffer.submit(std::move(made.call), endsOf(inBackground, isHooked));
  unlocked.reset();
  return {std::move(made.sums), std::move(made.missing), std::move(work)};
}

}  // namespace

void bindEp(py::module_& m) {
  using WithoutLock = py::call_guard<py::gil_scoped_release>;
  py::class_<EpWork, std::shared_ptr<EpWork>>(m, "EpWork")
      .def("wait", &EpWork::wait, WithoutLock())
      .def("synchronize", &EpWork::synchronize, WithoutLock())
      .def("is_completed", &EpWork::isCompleted);
  const auto shapeOf = [](const EpHandle& handle) -> const ep::Shape& {
    return handle.dispatch->shape;
  };
  py::class_<EpHandle>(m, "EpHandle")
      .def_property_readonly("num_experts",
                             [=](const EpHandle& h) { return shapeOf(h).numExperts; })
      .def_property_readonly("num_max_tokens",
                             [=](const EpHandle& h) { return shapeOf(h).maxTokens; })
      .def_property_readonly("hidden", [=](const EpHandle& h) { return shapeOf(h).hidden; });
  const auto none = py::none();
  py::class_<EpBuffer> buffer(m, "EpBuffer");
  bindNormalMode(m, buffer);
  buffer
      .def(py::init(&makeBuffer), py::arg("rank"), py::arg("size"), py::arg("num_bytes"),
           py::arg("timeout"), py::kw_only(), py::arg("backend") = none, py::arg("exchange") = none,
           py::arg("route_hint") = "", py::arg("renormalize") = false, py::arg("raises") = false,
           py::arg("engine") = none, py::arg("devices") = std::vector<std::string>(),
           py::arg("has_results") = true, py::arg("beside") = none, py::arg("bytes_beside") = 0)
      .def_static("size_hint", &EpBuffer::sizeHint, py::arg("num_max_tokens"), py::arg("hidden"),
                  py::arg("num_ranks"), py::arg("num_experts"))
      .def("dispatch", &dispatch, py::arg("x"), py::arg("topk_idx"), py::arg("num_max_tokens"),
           py::arg("num_experts"), py::arg("use_fp8"), py::arg("round_scale") = false,
           py::arg("use_ue8m0") = false, py::arg("active_ranks") = none, py::arg("timeout_us") = -1,
           py::arg("background") = false, py::arg("hooked") = false,
           py::arg("cumulative_recv_stats") = none, py::arg("wait_stats") = none,
           py::arg("keeps_rows") = true)
      .def("combine", &combine, py::arg("x"), py::arg("topk_idx"), py::arg("topk_weights"),
           py::arg("handle"), py::arg("use_logfmt") = false, py::arg("zero_copy") = false,
           py::arg("out") = none, py::arg("active_ranks") = none, py::arg("timeout_us") = -1,
           py::arg("background") = false, py::arg("hooked") = false, py::arg("wait_stats") = none)
      .def("next_combine_buffer", &EpBuffer::nextCombineBuffer, WithoutLock(), py::arg("handle"))
      .def("set_expert_owners", &EpBuffer::setExpertOwners, py::arg("owners"))
      .def("mask_rank", &EpBuffer::maskRank, py::arg("rank"), py::arg("is_masked"))
      .def("show_masked_ranks", &EpBuffer::showMaskedRanks, WithoutLock(), py::arg("shown"))
      .def("unmask_all", &EpBuffer::unmaskAll)
      .def("local_buffer", &EpBuffer::localBuffer)
      .def("stream_on", &EpBuffer::streamOn, py::arg("device"))
      .def_property_readonly("num_bytes", &EpBuffer::numBytes)
      .def_property_readonly("hosts",
                             [](const EpBuffer& b) { return b.buffer()->hosts().splitAll(); })
      .def_property_readonly("active_ranks", &EpBuffer::activeRanks)
      .def("update_members", &EpBuffer::updateMembers)
      .def("close", &EpBuffer::close, WithoutLock(), py::arg("timeout"));
}

}  // namespace mooncake
