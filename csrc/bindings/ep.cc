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
#include "backend/ep_buffer.h"
#include "backend/ep_normal.h"
#include "backend/ep_tensors.h"
#include "backend/mooncake_backend.h"
#include "base/log.h"
#include "base/thread.h"
#include "bindings/capture.h"
#include "bindings/ep_tokens.h"
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
std::unique_ptr<Group> makeGroupOfOwnJob(ep::OwnJobOptions options, const Exchange& exchange,
                                         const std::optional<InnerTransferEngine>& engine,
                                         Deadline deadline) {
  if (engine) options.lent = lendForJob(*engine, options.lentKey);
  auto job = orThrow(ep::OwnJob::prepare(std::move(options)));
  const auto proposals = exchange(toPython(job.proposedKey()));
  const auto meet = [&](const Bytes& mine) -> Result<std::vector<Bytes>> {
    py::gil_scoped_acquire locked;
    try {
      std::vector<Bytes> all;
      for (const py::bytes& one : exchange(toPython(mine))) all.push_back(toBytes(one));
      return all;
    } catch (const std::exception& error) {
      return Error{ErrorCode::kSystem,
                   std::string("the exchange of addresses failed: ") + error.what()};
    }
  };
  Bytes first = proposals.empty() ? Bytes() : toBytes(proposals.front());
  py::gil_scoped_release unlocked;
  return orThrow(job.begin(std::move(first), meet, deadline));
}

std::unique_ptr<EpBuffer> makeBuffer(
    int rank, int size, size_t bytes, Seconds timeout,
    const std::optional<c10::intrusive_ptr<c10d::Backend>>& backend, const Exchange& exchange,
    const std::string& routeHint, bool renormalizes, bool raises,
    const std::optional<InnerTransferEngine>& engine, const std::vector<std::string>& devices,
    bool hasResults) {
  refuseCaptureOfConstruction("the construction of a Buffer cannot be recorded");
  const Deadline deadline = EpBuffer::deadlineIn(timeout);
  const auto env = orThrow(BackendEnv::read());
  std::unique_ptr<Group> group;
  std::shared_ptr<EpKernels> kernels;
  std::shared_ptr<TokenKernels> tokens;
  const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(timeout);
  if (backend) {
    const MooncakeBackend& ours = backendOfOurs(**backend);
    py::gil_scoped_release unlocked;
    group = makeEpGroup(ours, raises, deadline);
    if (env.epKernels && !raises && hasResults) {
      kernels = makeEpKernels(
          ours, bytes,
          {.timeout = limit, .renormalizes = renormalizes, .blocks = env.blockingWait});
    } else if (env.epKernels && !raises) {
      tokens = makeTokenKernels(ours, bytes, {.timeout = limit, .blocks = env.blockingWait});
    }
  } else if (exchange) {
    group = makeGroupOfOwnJob({.rank = rank,
                               .size = size,
                               .bytes = bytes,
                               .raises = raises,
                               .routeHint = routeHint,
                               .devices = devices},
                              exchange, engine, deadline);
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

// ---- the normal mode

using Counted = std::pair<std::vector<std::vector<uint32_t>>, std::vector<bool>>;
// Fields, sources, ends, participants.
using DispatchedTokens =
    std::tuple<std::vector<at::Tensor>, at::Tensor, at::Tensor, std::vector<bool>, EpHandle>;

Counted countTokens(EpBuffer& buffer, std::vector<uint32_t> numbers, const MaybeTensor& activeRanks,
                    int64_t timeoutMicros) {
  py::gil_scoped_release unlocked;
  auto counted = EpNormal(buffer).count(std::move(numbers), activeRanks, timeoutMicros);
  return {std::move(counted.numbers), std::move(counted.participants)};
}

DispatchedTokens dispatchTokens(EpBuffer& buffer, const std::vector<at::Tensor>& fields,
                                const at::Tensor& ranks, int64_t maxTokens, int64_t hidden,
                                const MaybeTensor& activeRanks, int64_t timeoutMicros,
                                const std::string& error, const std::vector<at::Tensor>& into,
                                const std::vector<int64_t>& begins,
                                const std::vector<int64_t>& ends, uint32_t agreed) {
  py::gil_scoped_release unlocked;
  auto made = EpNormal(buffer).dispatch({.fields = fields,
                                         .ranks = ranks,
                                         .maxTokens = maxTokens,
                                         .hidden = hidden,
                                         .among = {},
                                         .activeRanks = activeRanks,
                                         .timeoutMicros = timeoutMicros,
                                         .error = error,
                                         .into = into,
                                         .begins = begins,
                                         .ends = ends,
                                         .agreed = agreed});
  return {std::move(made.fields), std::move(made.sources), std::move(made.ends),
          std::move(made.participants), std::move(made.handle)};
}

std::shared_ptr<EpWork> combineTokens(EpBuffer& buffer, const at::Tensor& x, const EpHandle& handle,
                                      const at::Tensor& sums, const at::Tensor& missing,
                                      const MaybeTensor& extras, const MaybeTensor& extraSums,
                                      const std::vector<at::Tensor>& biases,
                                      const MaybeTensor& activeRanks, int64_t timeoutMicros,
                                      bool inBackground, const std::vector<int64_t>& firstRows,
                                      const std::shared_ptr<EpWork>& after,
                                      const std::vector<bool>& among) {
  py::gil_scoped_release unlocked;
  auto call = EpNormal(buffer).combine({.x = x,
                                        .firstRows = firstRows,
                                        .handle = handle,
                                        .extras = extras,
                                        .biases = biases,
                                        .sums = sums,
                                        .extraSums = extraSums,
                                        .missing = missing,
                                        .among = among,
                                        .activeRanks = activeRanks,
                                        .timeoutMicros = timeoutMicros});
  return buffer.submit(std::move(call), endsOf(inBackground, false), after);
}

std::shared_ptr<EpWork> sendTokensAgain(
    EpBuffer& buffer, const std::vector<at::Tensor>& fields, const std::vector<at::Tensor>& into,
    const at::Tensor& ranks, int64_t maxTokens, int64_t hidden, const std::vector<int64_t>& begins,
    const std::vector<int64_t>& ends, const std::vector<bool>& among,
    const MaybeTensor& activeRanks, int64_t timeoutMicros, uint32_t agreed) {
  py::gil_scoped_release unlocked;
  auto call = EpNormal(buffer).dispatchOnDevice({.fields = fields,
                                                 .ranks = ranks,
                                                 .maxTokens = maxTokens,
                                                 .hidden = hidden,
                                                 .among = among,
                                                 .activeRanks = activeRanks,
                                                 .timeoutMicros = timeoutMicros,
                                                 .error = {},
                                                 .into = into,
                                                 .begins = begins,
                                                 .ends = ends,
                                                 .agreed = agreed});
  return buffer.submit(std::move(call), Ends::kAtOnce);
}

std::pair<EpHandle, std::shared_ptr<EpWork>> sendTokensAtWorst(
    EpBuffer& buffer, const std::vector<at::Tensor>& fields, const at::Tensor& ranks,
    int64_t hidden, int64_t extras, const std::vector<at::Tensor>& into, const at::Tensor& sources,
    const at::Tensor& ends, const at::Tensor& table, const at::Tensor& participants,
    const MaybeTensor& activeRanks, uint32_t agreed, const EpHandle* of) {
  py::gil_scoped_release unlocked;
  auto made = EpNormal(buffer).dispatchAtWorst({.fields = fields,
                                                .ranks = ranks,
                                                .hidden = hidden,
                                                .extras = extras,
                                                .activeRanks = activeRanks,
                                                .agreed = agreed,
                                                .of = of,
                                                .into = into,
                                                .sources = sources,
                                                .ends = ends,
                                                .table = table,
                                                .participants = participants});
  auto work = buffer.submit(std::move(made.call), Ends::kAtOnce);
  return {std::move(made.handle), std::move(work)};
}

std::shared_ptr<EpWork> sendTokensAsWorst(EpBuffer& buffer, const EpHandle& handle,
                                          const std::vector<at::Tensor>& fields,
                                          const std::vector<at::Tensor>& into,
                                          const MaybeTensor& activeRanks, int64_t timeoutMicros,
                                          uint32_t agreed) {
  py::gil_scoped_release unlocked;
  auto call = EpNormal(buffer).dispatchAsWorst({.handle = handle,
                                                .fields = fields,
                                                .into = into,
                                                .activeRanks = activeRanks,
                                                .timeoutMicros = timeoutMicros,
                                                .agreed = agreed});
  return buffer.submit(std::move(call), Ends::kAtOnce);
}

void bindNormalMode(py::class_<EpBuffer>& buffer) {
  const auto none = py::none();
  buffer
      .def(
          "most_tokens",
          [](EpBuffer& ours, const std::vector<int64_t>& fieldBytes, int64_t hidden, int64_t extras,
             double rowsPerToken) {
            return EpNormal(ours).mostTokens(fieldBytes, hidden, extras, rowsPerToken);
          },
          py::arg("field_bytes"), py::arg("hidden"), py::arg("extras"), py::arg("rows_per_token"))
      .def(
          "new_result",
          [](EpBuffer& ours, const std::vector<int64_t>& sizes, const at::Tensor& like) {
            return newResult(*ours.results(), sizes, like.scalar_type());
          },
          py::arg("sizes"), py::arg("like"))
      .def("count_tokens", &countTokens, py::arg("numbers"), py::arg("active_ranks") = none,
           py::arg("timeout_us") = -1)
      .def("dispatch_tokens", &dispatchTokens, py::arg("fields"), py::arg("token_ranks"),
           py::arg("num_max_tokens"), py::arg("hidden"), py::arg("active_ranks") = none,
           py::arg("timeout_us") = -1, py::arg("error") = "",
           py::arg("into") = std::vector<at::Tensor>(), py::arg("begins") = std::vector<int64_t>(),
           py::arg("ends") = std::vector<int64_t>(), py::arg("agreed") = 0)
      .def("combine_tokens", &combineTokens, py::arg("x"), py::arg("handle"), py::arg("out"),
           py::arg("missing"), py::arg("extras") = none, py::arg("extra_sums") = none,
           py::arg("biases") = std::vector<at::Tensor>(), py::arg("active_ranks") = none,
           py::arg("timeout_us") = -1, py::arg("background") = false,
           py::arg("first_rows") = std::vector<int64_t>(), py::arg("after") = none,
           py::arg("among") = std::vector<bool>())
      .def("send_tokens_again", &sendTokensAgain, py::arg("fields"), py::arg("into"),
           py::arg("token_ranks"), py::arg("num_max_tokens"), py::arg("hidden"), py::arg("begins"),
           py::arg("ends"), py::arg("among"), py::arg("active_ranks") = none,
           py::arg("timeout_us") = -1, py::arg("agreed") = 0)
      .def("send_tokens_at_worst", &sendTokensAtWorst, py::arg("fields"), py::arg("token_ranks"),
           py::arg("hidden"), py::arg("extras"), py::arg("into"), py::arg("sources"),
           py::arg("ends"), py::arg("table"), py::arg("participants"),
           py::arg("active_ranks") = none, py::arg("agreed") = 0, py::arg("of") = none)
      .def("send_tokens_as_worst", &sendTokensAsWorst, py::arg("handle"), py::arg("fields"),
           py::arg("into"), py::arg("active_ranks") = none, py::arg("timeout_us") = -1,
           py::arg("agreed") = 0)
      .def("uses_words", &EpBuffer::usesWords, py::arg("device"));
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
      .def_property_readonly("number", [](const EpHandle& h) { return h.dispatch->number; })
      .def_property_readonly("num_experts",
                             [=](const EpHandle& h) { return shapeOf(h).numExperts; })
      .def_property_readonly("num_max_tokens",
                             [=](const EpHandle& h) { return shapeOf(h).maxTokens; })
      .def_property_readonly("hidden", [=](const EpHandle& h) { return shapeOf(h).hidden; });
  const auto none = py::none();
  py::class_<EpBuffer> buffer(m, "EpBuffer");
  bindNormalMode(buffer);
  bindTokenKernels(m, buffer);
  buffer
      .def(py::init(&makeBuffer), py::arg("rank"), py::arg("size"), py::arg("num_bytes"),
           py::arg("timeout"), py::kw_only(), py::arg("backend") = none, py::arg("exchange") = none,
           py::arg("route_hint") = "", py::arg("renormalize") = false, py::arg("raises") = false,
           py::arg("engine") = none, py::arg("devices") = std::vector<std::string>(),
           py::arg("has_results") = true)
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
