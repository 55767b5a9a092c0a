#include "backend/experts/ep_buffer.h"

#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include "backend/arguments.h"
#include "backend/device/host_tensors.h"
#include "backend/errors.h"
#include "backend/experts/ep_interrupt.h"
#include "backend/experts/ep_normal.h"
#include "backend/experts/ep_tensors.h"
#include "backend/mooncake_backend.h"
#include "ep/calls.h"
#include "ep/layout.h"

namespace mooncake {
namespace {

at::Tensor emptyOn(const c10::Device& device, at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, at::TensorOptions(dtype).device(device));
}

ep::RowFormat formatOf(const EpBuffer::DispatchArguments& given) {
  return !given.usesFp8      ? ep::RowFormat::kBf16
         : given.roundsScale ? ep::RowFormat::kFp8Rounded
                             : ep::RowFormat::kFp8;
}

}  // namespace

std::unique_ptr<Group> makeEpGroup(const MooncakeBackend& ours, int size, bool raises,
                                   Deadline deadline) {
  return ours.group().makeGroup("ep", ep::slotBytesFor(size), ep::kPushBytes, raises, deadline, {},
                                size);
}

template <typename Kernels>
static std::shared_ptr<Kernels> makeKernels(const MooncakeBackend& ours, size_t bytes,
                                            typename Kernels::Settings settings) {
  KernelControl control = KernelControl::make([&](std::function<void(const GroupView&)> onView) {
    return ours.group().makeGroup("ep-peers", 0, 0, false, Deadline::after(settings.timeout),
                                  std::move(onView));
  });
  settings.name = control.group->name();
  settings.bytes = bytes;
  return std::make_shared<Kernels>(std::move(control), std::move(settings));
}

std::shared_ptr<EpKernels> makeEpKernels(const MooncakeBackend& ours, size_t bytes,
                                         EpKernels::Settings settings) {
  return makeKernels<EpKernels>(ours, ep::BufferLayout(bytes).sendBytes(), std::move(settings));
}

std::shared_ptr<TokenKernels> makeTokenKernels(const MooncakeBackend& ours, size_t bytes,
                                               TokenKernels::Settings settings) {
  return makeKernels<TokenKernels>(ours, ep::BufferLayout(bytes, false).sendBytes(),
                                   std::move(settings));
}

EpBuffer::EpBuffer(std::shared_ptr<ep::Buffer> buffer, Options options)
    : size_(buffer->group().size()),
      options_(std::move(options)),
      buffer_(std::move(buffer)),
      results_(BlockCache::make(buffer_->bytes())),
      streams_({.words = options_.streams.words && !options_.raises,
                .rows = true,
                .pinnedCache = options_.streams.pinnedCache},
               std::chrono::duration_cast<std::chrono::milliseconds>(options_.timeout)),
      normal_(std::make_unique<EpNormal>(*this)) {}

EpBuffer::~EpBuffer() { results_->close(); }

std::shared_ptr<Staging> EpBuffer::stagingFor(const c10::Device& device) {
  return device.is_cpu() ? nullptr : streams_.stagingOn(device);
}

bool EpBuffer::usesWords(const c10::Device& device) {
  return !device.is_cpu() && stagingFor(device)->isOrdered();
}

void EpBuffer::checkDispatch(const DispatchArguments& given) const {
  const at::Tensor& x = given.x;
  const c10::Device device = x.device();
  requireDevice(x, "x");
  TORCH_CHECK_VALUE(x.dim() == 2, "x has ", x.dim(), " dimensions, expected 2");
  requireTensor(x, "x", device, at::kBFloat16, {-1, -1});
  TORCH_CHECK_VALUE(given.maxTokens > 0, "num_max_dispatch_tokens_per_rank is ", given.maxTokens);
  TORCH_CHECK_VALUE(given.numExperts > 0, "num_experts is ", given.numExperts);
  TORCH_CHECK_VALUE(x.size(0) <= given.maxTokens, "rank ", rank(), " gives ", x.size(0),
                    " tokens, num_max_dispatch_tokens_per_rank is ", given.maxTokens);
  TORCH_CHECK_VALUE(x.size(1) > 0, "x has no channels");
  TORCH_CHECK_VALUE(!given.packsScales || (given.usesFp8 && given.roundsScale),
                    "use_ue8m0 needs use_fp8 and round_scale: it sends scales as exponents only");
  requireChoices(given.topk, device, x.size(0));
  if (given.activeRanks) requireMask(*given.activeRanks, device, size_);
  if (given.waits) requireTensor(*given.waits, "wait stats", device, at::kLong, {size_});
}

EpBuffer::Dispatch EpBuffer::dispatch(const DispatchArguments& given) {
  checkDispatch(given);
  const at::Tensor& x = given.x;
  const c10::Device device = x.device();
  const auto experts = orThrow(buffer_->experts(given.numExperts));
  const auto local = int64_t(experts->numLocal(rank()));
  if (given.addedCounts)
    requireTensor(*given.addedCounts, "cumulative stats", device, at::kInt, {local});
  const auto handle = std::make_shared<ep::Handle>();
  handle->shape = {size_, given.numExperts, size_t(given.maxTokens), size_t(x.size(1))};
  handle->experts = experts;
  handle->tokens = size_t(x.size(0));
  handle->topk = size_t(given.topk.size(1));
  throwIfError(buffer_->checkRoom(handle->shape, *experts));
  if (!device.is_cpu() && options_.kernels && options_.kernels->takes(device))
    return dispatchByKernels(given, handle);
  throwIfError(buffer_->checkTable(handle->tokens, handle->topk, given.numExperts));

  const auto staging = stagingFor(device);
  const HostTensors host(staging.get());
  const auto run = std::make_shared<DispatchRun>();
  run->rank = rank();
  run->topk = host.input(given.topk, "topk_idx");
  if (given.activeRanks)
    run->activeRanks = host.inOut(given.activeRanks->narrow(0, 0, size_), "active_ranks");
  ep::DispatchCall& call = run->call;
  call.format = formatOf(given);
  call.packsScales = given.packsScales;
  call.mask = buffer_->callerMask();
  call.patience = patienceOf(given.timeoutMicros);
  call.handle = handle;
  if (!staging) throwIfError(run->read());

  Dispatch made{.handle = {buffer_, handle, device}, .call = {run, staging}};
  made.counts = emptyOn(device, {local}, at::kInt);
  made.sources = emptyOn(device, {local, size_ * given.maxTokens}, at::kInt);
  made.ranges = emptyOn(device, {local, size_}, at::kLong);
  run->x = host.input(x, "x");
  run->counts = host.output(made.counts, "recv_count");
  run->sources = host.output(made.sources, "src_info");
  run->ranges = host.output(made.ranges, "layout_range");
  if (given.addedCounts) run->addedCounts = host.inOut(*given.addedCounts, "cumulative stats");
  if (given.waits) run->waits = host.inOut(*given.waits, "wait stats");
  staging ? makeStagedRows(made, *run) : makeRows(made, *run);
  if (!staging && given.keepsRows) made.call.kept = call.rows;
  return made;
}

PeerExperts::Limits EpBuffer::kernelLimits(int64_t timeoutMicros) const {
  return {.most = std::chrono::duration_cast<Clock::duration>(options_.timeout),
          .skipAfter = patienceOf(timeoutMicros).value_or(Clock::duration(0))};
}

EpBuffer::Dispatch EpBuffer::dispatchByKernels(const DispatchArguments& given,
                                               std::shared_ptr<ep::Handle> handle) {
  const c10::Device device = given.x.device();
  const auto [local, rows, hidden] = sizesOfRows(*handle);
  Dispatch made{.rows = emptyOn(device, {local, rows, hidden},
                                given.usesFp8 ? at::kFloat8_e4m3fn : at::kBFloat16),
                .counts = emptyOn(device, {local}, at::kInt),
                .sources = emptyOn(device, {local, rows}, at::kInt),
                .ranges = emptyOn(device, {local, size_}, at::kLong),
                .handle = {buffer_, handle, device, EpKept{}}};
  std::optional<at::Tensor> scales;
  if (given.usesFp8) {
    const auto words = int64_t(ep::scaleWordsOf(size_t(hidden), given.packsScales));
    scales = emptyOn(device, {local, words, rows}, given.packsScales ? at::kInt : at::kFloat);
    made.scales = scales->transpose(1, 2);
  }
  made.call.kernels = options_.kernels->dispatch({.x = given.x,
                                                  .topk = given.topk,
                                                  .activeRanks = given.activeRanks,
                                                  .addedCounts = given.addedCounts,
                                                  .waits = given.waits,
                                                  .format = formatOf(given),
                                                  .packsScales = given.packsScales,
                                                  .rows = made.rows,
                                                  .counts = made.counts,
                                                  .sources = made.sources,
                                                  .ranges = made.ranges,
                                                  .scales = std::move(scales)},
                                                 *handle, *made.handle.kept);
  made.call.limits = kernelLimits(given.timeoutMicros);
  return made;
}

EpBuffer::Combine EpBuffer::combineByKernels(const CombineArguments& given) {
  const ep::Handle& handle = *given.handle.dispatch;
  const c10::Device& device = given.handle.device;
  const auto tokens = int64_t(handle.tokens), hidden = int64_t(handle.shape.hidden);
  Combine made{.sums = given.out ? *given.out : emptyOn(device, {tokens, hidden}, at::kBFloat16),
               .missing = emptyOn(device, {tokens}, at::kBool)};
  made.call.kernels = options_.kernels->combine({.x = given.zeroCopy ? *inPlaceOnDevice_ : given.x,
                                                 .topk = given.topk,
                                                 .weights = given.weights,
                                                 .activeRanks = given.activeRanks,
                                                 .waits = given.waits,
                                                 .isInPlace = given.zeroCopy && areRowsPublished_,
                                                 .usesLogfmt = given.usesLogfmt,
                                                 .sums = made.sums,
                                                 .missing = made.missing},
                                                *given.handle.kept);
  made.call.limits = kernelLimits(given.timeoutMicros);
  inPlaceOnDevice_.reset();
  return made;
}

// Rows in the buffer's own memory.
void EpBuffer::makeRows(Dispatch& made, DispatchRun& run) {
  ep::DispatchCall& call = run.call;
  const auto [local, rows, hidden] = sizesOfRows(*call.handle);
  const bool usesFp8 = call.format != ep::RowFormat::kBf16;
  call.rows = buffer_->nextRecv();
  made.rows = inMemory(call.rows, {local, rows, hidden}, {rows * hidden, hidden, 1},
                       usesFp8 ? at::kFloat8_e4m3fn : at::kBFloat16);
  if (!usesFp8) return;
  const auto words = int64_t(ep::scaleWordsOf(size_t(hidden), call.packsScales));
  call.scales = call.rows + ep::BufferLayout::scalesOffset(size_t(local * rows), size_t(hidden));
  made.scales = inMemory(call.scales, {local, rows, words}, {words * rows, 1, rows},
                         call.packsScales ? at::kInt : at::kFloat);
}

// Rows in pinned memory, from which they are copied to the device.
void EpBuffer::makeStagedRows(Dispatch& made, DispatchRun& run) {
  ep::DispatchCall& call = run.call;
  const c10::Device device = made.handle.device;
  const auto [local, rows, hidden] = sizesOfRows(*call.handle);
  const bool usesFp8 = call.format != ep::RowFormat::kBf16;
  made.rows = emptyOn(device, {local, rows, hidden}, usesFp8 ? at::kFloat8_e4m3fn : at::kBFloat16);
  Staging& staging = *made.call.staging;
  made.handle.usedRows = run.usedRows = staging.newCounts(local);
  const at::Tensor host = staging.output(made.rows, "recv_x", {.counts = run.usedRows});
  run.kept.push_back(host);
  call.rows = static_cast<std::byte*>(host.mutable_data_ptr());
  if (!usesFp8) return;
  const auto words = int64_t(ep::scaleWordsOf(size_t(hidden), call.packsScales));
  const at::Tensor scales =
      emptyOn(device, {local, words, rows}, call.packsScales ? at::kInt : at::kFloat);
  made.scales = scales.transpose(1, 2);
  run.kept.push_back(
      staging.output(scales, "the scales of recv_x", {.counts = run.usedRows, .areLast = true}));
  call.scales = static_cast<std::byte*>(run.kept.back().mutable_data_ptr());
}

void EpBuffer::checkCombine(const CombineArguments& given) const {
  const ep::Handle& of = *given.handle.dispatch;
  const c10::Device& device = given.handle.device;
  TORCH_CHECK_VALUE(given.handle.buffer == buffer_,
                    "the handle is of a dispatch of another buffer");
  TORCH_CHECK_VALUE(!(given.usesLogfmt && given.zeroCopy),
                    "use_logfmt and zero_copy exclude each other: zero_copy sends the rows as they "
                    "are in the buffer");
  const auto [local, rows, hidden] = sizesOfRows(of);
  const auto tokens = int64_t(of.tokens), topks = int64_t(of.topk);
  requireTensor(given.weights, "topk_weights", device, at::kFloat, {tokens, topks});
  requireChoices(given.topk, device, tokens);
  TORCH_CHECK_VALUE(given.topk.size(1) == topks, "topk_idx has ", given.topk.size(1),
                    " experts per token, the dispatch had ", topks);
  if (given.activeRanks) requireMask(*given.activeRanks, device, size_);
  if (given.waits) requireTensor(*given.waits, "wait stats", device, at::kLong, {size_});
  if (given.out) requireTensor(*given.out, "out", device, at::kBFloat16, {tokens, hidden});
  if (given.zeroCopy) {
    TORCH_CHECK_VALUE(device.is_cpu() ? inPlace_.has_value() : inPlaceOnDevice_.has_value(),
                      "zero_copy: call get_next_combine_buffer() before each combine, and write "
                      "the rows into the tensor that it returns");
  }
  if (!given.zeroCopy) {
    requireTensor(given.x, "x", device, at::kBFloat16, {local, rows, hidden});
  } else if (!device.is_cpu()) {
    TORCH_CHECK_VALUE(inPlaceOnDevice_->sizes() == at::IntArrayRef({local, rows, hidden}),
                      "zero_copy: the rows are those of another handle's dispatch");
  }
}

EpBuffer::Combine EpBuffer::combine(const CombineArguments& given) {
  checkCombine(given);
  if (given.handle.kept) return combineByKernels(given);
  const auto handle = given.handle.dispatch;
  const c10::Device& device = given.handle.device;
  const auto tokens = int64_t(handle->tokens), hidden = int64_t(handle->shape.hidden);
  const auto staging = stagingFor(device);
  const HostTensors host(staging.get());
  const auto run = std::make_shared<CombineRun>();
  run->topk = host.input(given.topk, "topk_idx");
  if (given.activeRanks)
    run->activeRanks = host.inOut(given.activeRanks->narrow(0, 0, size_), "active_ranks");
  ep::CombineCall& call = run->call;
  call.mask = buffer_->callerMask();
  call.usesLogfmt = given.usesLogfmt;
  call.renormalizes = options_.renormalizes;
  call.patience = patienceOf(given.timeoutMicros);
  call.handle = handle;
  if (!staging) throwIfError(run->read());

  call.rowStride = ep::bf16Bytes(handle->shape.hidden);
  if (staging) {
    run->x = staging->input(given.zeroCopy ? *inPlaceOnDevice_ : given.x, "x",
                            {.counts = given.handle.usedRows});
  } else if (given.zeroCopy) {
    call.isInPlace = true;
    call.expectedNumber = inPlace_->number;
    call.rowStride = ep::combineRowBytes(handle->shape.hidden);
    call.x = inPlace_->data;
  } else {
    run->x = given.x;
  }
  Combine made{.sums = given.out ? *given.out : emptyOn(device, {tokens, hidden}, at::kBFloat16),
               .missing = emptyOn(device, {tokens}, at::kBool),
               .call = {run, staging}};
  run->weights = host.input(given.weights, "topk_weights");
  run->target = run->sums = host.output(made.sums, "out");
  // In mode `raise`, a call that ends with a loss must not change the caller's tensor.
  if (given.out && options_.raises && !staging) run->sums = at::empty_like(*given.out);
  run->missing = host.output(made.missing, "missing_contributions");
  if (given.waits) run->waits = host.inOut(*given.waits, "wait stats");
  inPlace_.reset();
  inPlaceOnDevice_.reset();
  return made;
}

std::function<Status(ep::Memory&)> EpBuffer::runOf(Call call) const {
  if (!call.staging) {
    return [run = std::move(call.run), deadline = deadlineIn(options_.timeout)](
               ep::Memory& memory) { return run->run(memory, {}, deadline); };
  }
  return
      [run = std::move(call.run), limit = options_.timeout, endsGroup = call.staging->isOrdered(),
       turn = std::make_shared<StagedTurn>(std::move(call.staging))](ep::Memory& memory) {
        Status inputs = turn->fetch(memory.group);
        if (inputs.ok()) inputs = run->read();
        Status status = run->run(memory, inputs, deadlineIn(limit));
        // Before the stream goes on: a program that has waited for it learns of the error.
        if (!status.ok() && endsGroup) memory.group.fail(status.error());
        status = turn->end(std::move(status));
        if (!status.ok() && endsGroup) memory.group.fail(status.error());
        return status;
      };
}

std::shared_ptr<EpWork> EpBuffer::submit(Call call, Ends ends,
                                         const std::shared_ptr<EpWork>& after) {
  const bool inBackground = ends != Ends::kAtOnce;
  if (call.kernels) {
    return options_.kernels->submit(std::move(*call.kernels), call.limits, ends == Ends::kByHook,
                                    !inBackground);
  }
  EpInterrupt interrupt(buffer_->group());
  const auto staging = call.staging;
  std::byte* const kept = call.kept;
  const bool isOrdered = staging && staging->isOrdered();
  if (isOrdered) throwIfError(buffer_->group().usable());
  auto run = runOf(std::move(call));
  if (after) {
    run = [run = std::move(run), before = after->task()](ep::Memory& memory) {
      return before->status().ok() ? run(memory) : before->status();
    };
  }
  const auto queue = [&] {
    if (staging) staging->mark();
    return buffer_->submit(std::move(run), inBackground || isOrdered);
  };
  const auto queueInOrder = [&] {
    // No other call may come between the mark and the place in the queue.
    const Guard order(orderMutex_);
    return queue();
  };
  std::shared_ptr<ep::Task> task = isOrdered ? queueInOrder() : queue();
  interrupt.rethrow();
  if (kept) buffer_->keepResult(kept, task);
  auto work = std::make_shared<EpTaskWork>(buffer_, std::move(task), staging, options_.blocks);
  if (!inBackground) work->wait();
  return work;
}

at::Tensor EpBuffer::nextCombineBuffer(const EpHandle& handle) {
  TORCH_CHECK_VALUE(handle.buffer == buffer_, "the handle is of a dispatch of another buffer");
  const auto [local, rows, hidden] = sizesOfRows(*handle.dispatch);
  if (handle.kept) inPlaceOnDevice_ = options_.kernels->nextRows(*handle.kept);
  areRowsPublished_ = handle.kept && inPlaceOnDevice_;
  if (areRowsPublished_) return *inPlaceOnDevice_;
  if (!handle.device.is_cpu()) {
    inPlaceOnDevice_ = emptyOn(handle.device, {local, rows, hidden}, at::kBFloat16);
    return *inPlaceOnDevice_;
  }
  auto next = buffer_->nextSend(deadlineIn(options_.timeout));
  throwIfError(next.status());
  inPlace_ = *next;
  const auto stride = int64_t(ep::combineRowBytes(size_t(hidden)) / sizeof(uint16_t));
  return inMemory(inPlace_->data, {local, rows, hidden}, {rows * stride, stride, 1}, at::kBFloat16);
}

void EpBuffer::setExpertOwners(std::vector<int> owners) {
  for (size_t e = 0; e < owners.size(); ++e) {
    TORCH_CHECK_VALUE(owners[e] >= 0 && owners[e] < size_, "expert ", e, ": rank ", owners[e],
                      " is none of ", size_);
  }
  TORCH_CHECK_VALUE(!owners.empty(), "the list of expert owners is empty");
  buffer_->setExperts(std::make_shared<const ep::ExpertMap>(std::move(owners), size_));
}

void EpBuffer::maskRank(int rank, bool isMasked) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "rank ", rank, " is none of ", size_);
  buffer_->mask(rank, isMasked);
  if (options_.kernels) options_.kernels->setMask(buffer_->callerMask());
}

void EpBuffer::unmaskAll() {
  buffer_->unmaskAll();
  if (options_.kernels) options_.kernels->setMask(buffer_->callerMask());
}

void EpBuffer::showMaskedRanks(const at::Tensor& shown) {
  requireDevice(shown, "mask_status");
  requireTensor(shown, "mask_status", shown.device(), at::kInt, {size_});
  const auto staging = stagingFor(shown.device());
  const HostTensors host(staging.get());
  const auto run =
      std::make_shared<MaskRun>(host.output(shown, "mask_status"), buffer_->callerMask());
  if (staging && staging->isOrdered()) {
    submit({run, staging}, Ends::kAtOnce);
    return;
  }
  // Calls under way are not waited for.
  if (staging) staging->mark();
  run->show(buffer_->group());
  if (!staging) return;
  staging->giveBack();
  staging->block();
}

std::vector<bool> EpBuffer::activeRanks() const {
  const GroupRanks view = buffer_->view();
  std::vector<bool> active;
  for (int r = 0; r < size_; ++r) active.push_back(view.contains(r));
  return active;
}

c10::Stream EpBuffer::streamOn(const c10::Device& device) {
  if (options_.kernels && options_.kernels->areOn(device)) return options_.kernels->stream();
  if (options_.tokens && options_.tokens->areOn(device)) return options_.tokens->stream();
  return streams_.streamOn(device);
}

at::Tensor EpBuffer::localBuffer() const {
  return inMemory(buffer_->data(), {int64_t(buffer_->bytes())}, {1}, at::kByte);
}

void EpBuffer::updateMembers() const { throwIfError(buffer_->group().usable()); }

void EpBuffer::close(Seconds timeout) {
  if (options_.kernels) options_.kernels->close(deadlineIn(timeout));
  if (options_.tokens) options_.tokens->close(deadlineIn(timeout));
  buffer_->close(deadlineIn(timeout));
  results_->close();
}

size_t EpBuffer::sizeHint(size_t maxTokens, size_t hidden, int ranks, int experts) {
  TORCH_CHECK_VALUE(ranks > 0 && experts > 0, "at least one rank and one expert");
  return ep::sizeHint({ranks, experts, maxTokens, hidden});
}

Deadline EpBuffer::deadlineIn(Seconds timeout) {
  return Deadline::after(std::chrono::duration_cast<Clock::duration>(timeout));
}

EpBuffer::RowSizes EpBuffer::sizesOfRows(const ep::Handle& handle) const {
  return {.local = int64_t(handle.experts->numLocal(rank())),
          .rows = size_ * int64_t(handle.shape.maxTokens),
          .hidden = int64_t(handle.shape.hidden)};
}

std::optional<Clock::duration> EpBuffer::patienceOf(int64_t timeoutMicros) const {
  const std::chrono::duration<double, std::micro> wanted(timeoutMicros);
  if (timeoutMicros <= 0 || wanted >= options_.timeout) return std::nullopt;
  return std::chrono::duration_cast<Clock::duration>(wanted);
}

// Returns a tensor in the buffer's memory. The tensor keeps the buffer alive.
at::Tensor EpBuffer::inMemory(std::byte* data, at::IntArrayRef sizes, at::IntArrayRef strides,
                              at::ScalarType dtype) const {
  return at::from_blob(
      data, sizes, strides, [keeps = buffer_](void*) {}, at::TensorOptions(dtype));
}

}  // namespace mooncake
