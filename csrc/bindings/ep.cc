#include "bindings/ep.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <random>
#include <tuple>

#include <ATen/ATen.h>
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "backend/errors.h"
#include "backend/mooncake_backend.h"
#include "backend/signals.h"
#include "base/log.h"
#include "base/thread.h"
#include "bindings/ep_tensors.h"
#include "bindings/transfer.h"
#include "ep/buffer.h"

namespace py = pybind11;

namespace mooncake {
namespace {

using Seconds = std::chrono::duration<double>;

// Room for a routing table of 4096 tokens with top-32, and for the rest of a slot's content.
constexpr size_t kSlotBytes = size_t(1) << 20;
constexpr int kMostRanksWithSuchSlots = 64;
constexpr size_t kArenaBytes = size_t(4) << 30;

size_t slotBytesFor(int size) { return size <= kMostRanksWithSuchSlots ? kSlotBytes : 0; }

Deadline deadlineIn(Seconds timeout) {
  return Deadline::after(std::chrono::duration_cast<Clock::duration>(timeout));
}

class Work {
 public:
  Work(std::shared_ptr<ep::Buffer> buffer, std::shared_ptr<ep::Task> task)
      : buffer_(std::move(buffer)), task_(std::move(task)) {}

  bool isCompleted() const { return task_->isDone(); }
  void wait() {
    {
      py::gil_scoped_release unlocked;
      Interrupt interrupt(buffer_->group());
      buffer_->await(*task_, [&] { interrupt.onSleep(); });
      interrupt.rethrow();
    }
    throwIfError(task_->status());
  }

  // After an interrupted call no rank can tell how the call would have ended, so the buffer becomes
  // unusable.
  class Interrupt final : public Interruptible {
   public:
    explicit Interrupt(Group& group) : group_(group) {}

   private:
    void giveUp(const std::string& why) override {
      group_.fail(
          {ErrorCode::kAborted, "a call was interrupted by " + why + ": make the buffer again"});
    }
    Group& group_;
  };

 private:
  const std::shared_ptr<ep::Buffer> buffer_;
  const std::shared_ptr<ep::Task> task_;
};

struct Handle {
  std::shared_ptr<ep::Buffer> buffer;
  std::shared_ptr<ep::Handle> of;
};

// Results are tuples, not classes with properties: each property would cost one percent of a call
// with one token. Rows, scales, counts, sources, ranges.
using Dispatched = std::tuple<at::Tensor, std::optional<at::Tensor>, at::Tensor, at::Tensor,
                              at::Tensor, Handle, std::shared_ptr<Work>>;
// The sums, and for each token whether a contribution is missing.
using Combined = std::tuple<at::Tensor, at::Tensor, std::shared_ptr<Work>>;

Bytes toBytes(const py::bytes& bytes) {
  const std::string text = bytes;
  const auto view = std::as_bytes(std::span(text));
  return {view.begin(), view.end()};
}

py::bytes toPython(ByteView bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Bytes randomKey() {
  std::random_device source;
  Bytes key(32);
  for (std::byte& byte : key) byte = std::byte(source());
  return key;
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

class EpBuffer {
 public:
  using PythonExchange = std::function<std::vector<py::bytes>(py::bytes)>;

  EpBuffer(int rank, int size, size_t bytes, Seconds timeout,
           const std::optional<c10::intrusive_ptr<c10d::Backend>>& backend,
           const std::optional<PythonExchange>& exchange, const std::string& routeHint,
           bool renormalizes, bool raises, const std::optional<InnerTransferEngine>& engine,
           const std::vector<std::string>& devices)
      : size_(size), timeout_(timeout), renormalizes_(renormalizes), raises_(raises) {
    const Deadline deadline = deadlineIn(timeout);
    std::unique_ptr<Group> group;
    if (backend) {
      const auto* ours = dynamic_cast<const MooncakeBackend*>(backend->get());
      if (!ours) throw py::type_error("backend: not one of mooncake's");
      py::gil_scoped_release unlocked;
      group = ours->makeGroup("ep", slotBytesFor(size), ep::kMailboxBytes, raises, deadline);
    } else if (exchange) {
      group = found(rank, size, bytes, deadline, *exchange, routeHint, raises, engine, devices);
    } else {
      throw py::value_error("either a backend or an exchange is needed");
    }
    py::gil_scoped_release unlocked;
    auto made = ep::Buffer::create(std::move(group), bytes, deadline);
    throwIfError(made.status());
    buffer_ = withPython(std::move(*made));
  }

  ~EpBuffer() {
    py::gil_scoped_release unlocked;
    buffer_.reset();
  }
  EpBuffer(const EpBuffer&) = delete;
  EpBuffer& operator=(const EpBuffer&) = delete;

  Dispatched dispatch(const at::Tensor& x, const at::Tensor& topk, int64_t maxTokens,
                      int numExperts, bool usesFp8, bool roundsScale, bool packsScales,
                      const std::optional<at::Tensor>& activeRanks, int64_t timeoutMicros,
                      bool inBackground, const std::optional<at::Tensor>& addedCounts,
                      const std::optional<at::Tensor>& waits) {
    TORCH_CHECK_VALUE(x.dim() == 2, "x has ", x.dim(), " dimensions, expected 2");
    requireTensor(x, "x", at::kBFloat16, {-1, -1});
    TORCH_CHECK_VALUE(maxTokens > 0, "num_max_dispatch_tokens_per_rank is ", maxTokens);
    TORCH_CHECK_VALUE(numExperts > 0, "num_experts is ", numExperts);
    TORCH_CHECK_VALUE(x.size(0) <= maxTokens, "rank ", rank(), " gives ", x.size(0),
                      " tokens, num_max_dispatch_tokens_per_rank is ", maxTokens);
    TORCH_CHECK_VALUE(x.size(1) > 0, "x has no channels");
    TORCH_CHECK_VALUE(!packsScales || (usesFp8 && roundsScale),
                      "use_ue8m0 needs use_fp8 and round_scale: it sends scales as exponents only");
    auto experts = buffer().experts(numExperts);
    throwIfError(experts.status());
    const auto local = int64_t((*experts)->numLocal(rank()));

    const auto handle = std::make_shared<ep::Handle>();
    handle->shape = {size_, numExperts, size_t(maxTokens), size_t(x.size(1))};
    handle->experts = *experts;
    handle->tokens = size_t(x.size(0));
    handle->chosen = chosenExperts(topk, x.size(0), numExperts);
    handle->topk = size_t(topk.size(1));
    throwIfError(ep::checkRepeated(**experts, handle->chosen, size_t(maxTokens), rank()));
    throwIfError(buffer().checkRoom(handle->shape, **experts));
    throwIfError(buffer().checkTable(handle->tokens, handle->topk, numExperts));
    ep::DispatchCall call;
    call.mask = mask(activeRanks);
    if (addedCounts) requireTensor(*addedCounts, "cumulative stats", at::kInt, {local});
    if (waits) requireTensor(*waits, "wait stats", at::kLong, {size_});

    const int64_t rows = size_ * maxTokens, hidden = x.size(1);
    call.format = !usesFp8      ? ep::RowFormat::kBf16
                  : roundsScale ? ep::RowFormat::kFp8Rounded
                                : ep::RowFormat::kFp8;
    call.packsScales = packsScales;
    call.handle = handle;
    call.deadline = deadlineIn(timeout_);
    call.patience = patienceOf(timeoutMicros);
    call.x = reinterpret_cast<const uint16_t*>(x.const_data_ptr());
    call.rows = buffer().nextRecv();
    const auto dtype = usesFp8 ? at::kFloat8_e4m3fn : at::kBFloat16;
    at::Tensor received =
        inMemory(call.rows, {local, rows, hidden}, {rows * hidden, hidden, 1}, dtype);
    std::optional<at::Tensor> scales;
    if (usesFp8) {
      const int64_t numScales = int64_t(ep::scalesOf(size_t(hidden)));
      const int64_t words = packsScales ? (numScales + 3) / 4 : numScales;
      call.scales = call.rows + ep::roundUp(size_t(local * rows * hidden), 64);
      scales = inMemory(call.scales, {local, rows, words}, {words * rows, 1, rows},
                        packsScales ? at::kInt : at::kFloat);
    }
    at::Tensor counts = at::empty({local}, at::kInt);
    at::Tensor sources = at::empty({local, rows}, at::kInt);
    at::Tensor ranges = at::empty({local, size_}, at::kLong);
    call.counts = counts.mutable_data_ptr<int32_t>();
    call.sources = sources.mutable_data_ptr<int32_t>();
    call.ranges = ranges.mutable_data_ptr<int64_t>();
    if (addedCounts) call.addedCounts = addedCounts->mutable_data_ptr<int32_t>();
    if (waits) call.waits = waits->mutable_data_ptr<int64_t>();
    auto work = submit(
        [call = std::move(call), activeRanks, size = size_,
         kept =
             std::vector<at::Tensor>{x, counts, sources, ranges, addedCounts.value_or(at::Tensor()),
                                     waits.value_or(at::Tensor())}](
            ep::Memory& memory) mutable -> Status {
          ep::Ending ending;
          MOONCAKE_TRY(ep::dispatch(memory, call, ending));
          if (activeRanks) clearOthers(*activeRanks, size, ending.participants);
          return Status();
        },
        inBackground);
    return {std::move(received), std::move(scales),       std::move(counts), std::move(sources),
            std::move(ranges),   Handle{buffer_, handle}, std::move(work)};
  }

  Combined combine(const at::Tensor& x, const at::Tensor& topk, const at::Tensor& weights,
                   const Handle& handle, bool usesLogfmt, bool zeroCopy,
                   const std::optional<at::Tensor>& out,
                   const std::optional<at::Tensor>& activeRanks, int64_t timeoutMicros,
                   bool inBackground, const std::optional<at::Tensor>& waits) {
    const ep::Handle& of = *handle.of;
    TORCH_CHECK_VALUE(handle.buffer == buffer_, "the handle is of a dispatch of another buffer");
    TORCH_CHECK_VALUE(!(usesLogfmt && zeroCopy),
                      "use_logfmt and zero_copy exclude each other: zero_copy sends the rows as "
                      "they are in the buffer");
    const ep::Shape& shape = of.shape;
    const auto local = int64_t(of.experts->numLocal(rank()));
    const int64_t rows = size_ * int64_t(shape.maxTokens), hidden = int64_t(shape.hidden);
    const auto tokens = int64_t(of.tokens), topks = int64_t(of.topk);
    requireTensor(weights, "topk_weights", at::kFloat, {tokens, topks});
    ep::CombineCall call;
    call.chosen = chosenExperts(topk, tokens, shape.numExperts);
    TORCH_CHECK_VALUE(topk.size(1) == topks, "topk_idx has ", topk.size(1),
                      " experts per token, the dispatch had ", topks);
    for (size_t i = 0; i < call.chosen.size(); ++i) {
      TORCH_CHECK_VALUE(call.chosen[i] == of.chosen[i] || call.chosen[i] == ep::kNoExpert,
                        "topk_idx: token ", i / of.topk, " chooses expert ", call.chosen[i],
                        ", at its dispatch it chose ", of.chosen[i]);
    }
    call.mask = mask(activeRanks);
    if (waits) requireTensor(*waits, "wait stats", at::kLong, {size_});
    if (out) requireTensor(*out, "out", at::kBFloat16, {tokens, hidden});
    if (zeroCopy) {
      TORCH_CHECK_VALUE(inPlace_,
                        "zero_copy: call get_next_combine_buffer() before each combine, and write "
                        "the rows into the tensor that it returns");
      call.isInPlace = true;
      call.expectedNumber = inPlace_->number;
      call.rowStride = ep::combineRowBytes(shape.hidden);
    } else {
      requireTensor(x, "x", at::kBFloat16, {local, rows, hidden});
      call.rowStride = ep::bf16Bytes(shape.hidden);
    }
    call.x = zeroCopy ? inPlace_->data : static_cast<const std::byte*>(x.const_data_ptr());
    call.usesLogfmt = usesLogfmt;
    call.renormalizes = renormalizes_;
    call.weights = weights.const_data_ptr<float>();
    call.deadline = deadlineIn(timeout_);
    call.patience = patienceOf(timeoutMicros);
    call.handle = handle.of;
    at::Tensor combined = out ? *out : at::empty({tokens, hidden}, at::kBFloat16);
    at::Tensor missing = at::empty({tokens}, at::kBool);
    // In mode `raise`, a call that ends with a loss must not change the caller's tensor.
    const at::Tensor sum = out && raises_ ? at::empty_like(*out) : combined;
    call.combined = reinterpret_cast<uint16_t*>(sum.mutable_data_ptr());
    call.missing = missing.mutable_data_ptr<bool>();
    if (waits) call.waits = waits->mutable_data_ptr<int64_t>();
    inPlace_.reset();
    auto work = submit(
        [call = std::move(call), activeRanks, size = size_, sum, target = combined,
         kept = std::vector<at::Tensor>{x, weights, missing, waits.value_or(at::Tensor())}](
            const ep::Memory& memory) mutable -> Status {
          ep::Ending ending;
          MOONCAKE_TRY(ep::combine(memory, call, ending));
          if (!sum.is_same(target))
            std::memcpy(target.mutable_data_ptr(), sum.const_data_ptr(), sum.nbytes());
          if (activeRanks) clearOthers(*activeRanks, size, ending.participants);
          return Status();
        },
        inBackground);
    return {std::move(combined), std::move(missing), std::move(work)};
  }

  at::Tensor nextCombineBuffer(const Handle& handle) {
    TORCH_CHECK_VALUE(handle.buffer == buffer_, "the handle is of a dispatch of another buffer");
    {
      py::gil_scoped_release unlocked;
      auto next = buffer().nextSend(deadlineIn(timeout_));
      throwIfError(next.status());
      inPlace_ = *next;
    }
    const ep::Shape& shape = handle.of->shape;
    const auto local = int64_t(handle.of->experts->numLocal(rank()));
    const int64_t rows = size_ * int64_t(shape.maxTokens);
    const auto stride = int64_t(ep::combineRowBytes(shape.hidden) / sizeof(uint16_t));
    return inMemory(inPlace_->data, {local, rows, int64_t(shape.hidden)},
                    {rows * stride, stride, 1}, at::kBFloat16);
  }

  void setExpertOwners(std::vector<int> owners) {
    for (size_t e = 0; e < owners.size(); ++e) {
      TORCH_CHECK_VALUE(owners[e] >= 0 && owners[e] < size_, "expert ", e, ": rank ", owners[e],
                        " is none of ", size_);
    }
    TORCH_CHECK_VALUE(!owners.empty(), "the list of expert owners is empty");
    buffer().setExperts(std::make_shared<const ep::ExpertMap>(std::move(owners), size_));
  }

  void maskRank(int rank, bool isMasked) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "rank ", rank, " is none of ", size_);
    buffer().mask(rank, isMasked);
  }
  std::vector<bool> maskedRanks() {
    const GroupRanks active = buffer().callerMask() & buffer().view();
    std::vector<bool> masked;
    for (int r = 0; r < size_; ++r) masked.push_back(!active.contains(r));
    return masked;
  }
  void unmaskAll() { buffer().unmaskAll(); }
  std::vector<bool> activeRanks() {
    const GroupRanks view = buffer().view();
    std::vector<bool> active;
    for (int r = 0; r < size_; ++r) active.push_back(view.contains(r));
    return active;
  }

  at::Tensor localBuffer() {
    return inMemory(buffer().data(), {int64_t(buffer().bytes())}, {1}, at::kByte);
  }
  size_t numBytes() { return buffer().bytes(); }
  void updateMembers() { throwIfError(buffer().group().usable()); }
  void close(Seconds timeout) {
    py::gil_scoped_release unlocked;
    buffer_->close(deadlineIn(timeout));
  }

 private:
  ep::Buffer& buffer() { return *buffer_; }
  int rank() { return buffer_->group().rank(); }

  // Makes a job of its own. Its ranks exchange keys and addresses through the Python function.
  std::unique_ptr<Group> found(int rank, int size, size_t bytes, Deadline deadline,
                               const PythonExchange& exchange, const std::string& routeHint,
                               bool raises, const std::optional<InnerTransferEngine>& given,
                               const std::vector<std::string>& devices) const {
    auto env = EngineEnv::read();
    throwIfError(env.status());
    const auto groupEnv = GroupEnv::read();
    throwIfError(groupEnv.status());
    std::string givenKey;
    const auto lent = given ? lendForJob(*given, givenKey) : nullptr;
    if (lent) env->jobKey = std::move(givenKey);
    env->routeHint = routeHint;
    env->fabricDevices = devices;
    const Bytes ours = env->jobKey ? Bytes() : randomKey();
    const auto keys = exchange(toPython(ours));
    Bytes key = keys.empty() ? Bytes() : toBytes(keys.front());
    if (env->jobKey) {
      const auto given = std::as_bytes(std::span(*env->jobKey));
      key.assign(given.begin(), given.end());
    }
    EngineOptions options{.env = std::move(*env),
                          .logName = "ep rank " + std::to_string(rank),
                          .arenaBytes = std::max(kArenaBytes, 2 * bytes)};
    options.jobKey = std::move(key);
    auto engine = lent ? Result<std::shared_ptr<Engine>>(lent) : Engine::create(std::move(options));
    throwIfError(engine.status());
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
    py::gil_scoped_release unlocked;
    auto group = Group::create(std::move(*engine), Group::Exchange(meet),
                               {.name = "ep",
                                .rank = rank,
                                .size = size,
                                .env = *groupEnv,
                                .slotBytes = slotBytesFor(size),
                                .mailboxBytes = ep::kMailboxBytes,
                                .raises = raises},
                               deadline);
    throwIfError(group.status());
    return std::move(*group);
  }

  GroupRanks mask(const std::optional<at::Tensor>& activeRanks) {
    GroupRanks mask = buffer().callerMask();
    if (activeRanks) mask &= maskOf(*activeRanks, size_);
    return mask;
  }

  // Empty: no rank is skipped before the buffer's timeout.
  std::optional<Clock::duration> patienceOf(int64_t timeoutMicros) const {
    const std::chrono::duration<double, std::micro> wanted(timeoutMicros);
    if (timeoutMicros <= 0 || wanted >= timeout_) return std::nullopt;
    return std::chrono::duration_cast<Clock::duration>(wanted);
  }

  // Returns a tensor in the buffer's memory. The tensor keeps the buffer alive.
  at::Tensor inMemory(std::byte* data, at::IntArrayRef sizes, at::IntArrayRef strides,
                      at::ScalarType dtype) const {
    return at::from_blob(
        data, sizes, strides, [keeps = buffer_](void*) {}, at::TensorOptions(dtype));
  }

  std::shared_ptr<Work> submit(std::function<Status(ep::Memory&)> run, bool inBackground) {
    std::shared_ptr<ep::Task> task;
    {
      py::gil_scoped_release unlocked;
      Work::Interrupt interrupt(buffer().group());
      task = buffer().submit(std::move(run), inBackground);
      interrupt.rethrow();
    }
    if (!inBackground) throwIfError(task->status());
    return std::make_shared<Work>(buffer_, std::move(task));
  }

  const int size_;
  const Seconds timeout_;
  const bool renormalizes_;
  const bool raises_;
  std::shared_ptr<ep::Buffer> buffer_;
  std::optional<ep::Buffer::NextSend> inPlace_;
};

}  // namespace

void bindEp(py::module_& m) {
  py::class_<Work, std::shared_ptr<Work>>(m, "EpWork")
      .def("wait", &Work::wait)
      .def("is_completed", &Work::isCompleted);
  py::class_<Handle>(m, "EpHandle")
      .def_property_readonly("num_experts", [](const Handle& h) { return h.of->shape.numExperts; })
      .def_property_readonly("num_max_tokens",
                             [](const Handle& h) { return h.of->shape.maxTokens; })
      .def_property_readonly("hidden", [](const Handle& h) { return h.of->shape.hidden; });
  const auto none = py::none();
  py::class_<EpBuffer>(m, "EpBuffer")
      .def(py::init<int, int, size_t, Seconds,
                    const std::optional<c10::intrusive_ptr<c10d::Backend>>&,
                    const std::optional<EpBuffer::PythonExchange>&, const std::string&, bool, bool,
                    const std::optional<InnerTransferEngine>&, const std::vector<std::string>&>(),
           py::arg("rank"), py::arg("size"), py::arg("num_bytes"), py::arg("timeout"),
           py::kw_only(), py::arg("backend") = none, py::arg("exchange") = none,
           py::arg("route_hint") = "", py::arg("renormalize") = false, py::arg("raises") = false,
           py::arg("engine") = none, py::arg("devices") = std::vector<std::string>())
      .def_static(
          "size_hint",
          [](size_t maxTokens, size_t hidden, int ranks, int experts) {
            TORCH_CHECK_VALUE(ranks > 0 && experts > 0, "at least one rank and one expert");
            return ep::sizeHint({ranks, experts, maxTokens, hidden});
          },
          py::arg("num_max_tokens"), py::arg("hidden"), py::arg("num_ranks"),
          py::arg("num_experts"))
      .def("dispatch", &EpBuffer::dispatch, py::arg("x"), py::arg("topk_idx"),
           py::arg("num_max_tokens"), py::arg("num_experts"), py::arg("use_fp8"),
           py::arg("round_scale") = false, py::arg("use_ue8m0") = false,
           py::arg("active_ranks") = none, py::arg("timeout_us") = -1,
           py::arg("background") = false, py::arg("cumulative_recv_stats") = none,
           py::arg("wait_stats") = none)
      .def("combine", &EpBuffer::combine, py::arg("x"), py::arg("topk_idx"),
           py::arg("topk_weights"), py::arg("handle"), py::arg("use_logfmt") = false,
           py::arg("zero_copy") = false, py::arg("out") = none, py::arg("active_ranks") = none,
           py::arg("timeout_us") = -1, py::arg("background") = false, py::arg("wait_stats") = none)
      .def("next_combine_buffer", &EpBuffer::nextCombineBuffer, py::arg("handle"))
      .def("set_expert_owners", &EpBuffer::setExpertOwners, py::arg("owners"))
      .def("mask_rank", &EpBuffer::maskRank, py::arg("rank"), py::arg("is_masked"))
      .def("masked_ranks", &EpBuffer::maskedRanks)
      .def("unmask_all", &EpBuffer::unmaskAll)
      .def("local_buffer", &EpBuffer::localBuffer)
      .def_property_readonly("num_bytes", &EpBuffer::numBytes)
      .def_property_readonly("active_ranks", &EpBuffer::activeRanks)
      .def("update_members", &EpBuffer::updateMembers)
      .def("close", &EpBuffer::close, py::arg("timeout"));
}

}  // namespace mooncake
