#include "backend/ep_buffer.h"

#include <cstring>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include "backend/ep_tensors.h"
#include "backend/errors.h"
#include "backend/mooncake_backend.h"
#include "backend/signals.h"
#include "ep/calls.h"
#include "ep/layout.h"

namespace mooncake {
namespace {

// After an interrupted call no rank can tell how the call would have ended, so the buffer becomes
// unusable.
class CallInterrupt final : public Interruptible {
 public:
  explicit CallInterrupt(Group& group) : group_(group) {}

 private:
  void giveUp(const std::string& why) override {
    group_.fail(
        {ErrorCode::kAborted, "a call was interrupted by " + why + ": make the buffer again"});
  }
  Group& group_;
};

at::Tensor orEmpty(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}

}  // namespace

std::unique_ptr<Group> makeEpGroup(const MooncakeBackend& ours, bool raises, Deadline deadline) {
  return ours.makeGroup("ep", ep::slotBytesFor(ours.getSize()), ep::kMailboxBytes, raises,
                        deadline);
}

void EpWork::wait() {
  CallInterrupt interrupt(buffer_->group());
  buffer_->await(*task_, [&] { interrupt.onSleep(); });
  interrupt.rethrow();
  throwIfError(task_->status());
}

EpBuffer::Dispatch EpBuffer::dispatch(const DispatchArguments& given) {
  const at::Tensor& x = given.x;
  const int64_t maxTokens = given.maxTokens;
  TORCH_CHECK_VALUE(x.dim() == 2, "x has ", x.dim(), " dimensions, expected 2");
  requireTensor(x, "x", at::kBFloat16, {-1, -1});
  TORCH_CHECK_VALUE(maxTokens > 0, "num_max_dispatch_tokens_per_rank is ", maxTokens);
  TORCH_CHECK_VALUE(given.numExperts > 0, "num_experts is ", given.numExperts);
  TORCH_CHECK_VALUE(x.size(0) <= maxTokens, "rank ", rank(), " gives ", x.size(0),
                    " tokens, num_max_dispatch_tokens_per_rank is ", maxTokens);
  TORCH_CHECK_VALUE(x.size(1) > 0, "x has no channels");
  TORCH_CHECK_VALUE(!given.packsScales || (given.usesFp8 && given.roundsScale),
                    "use_ue8m0 needs use_fp8 and round_scale: it sends scales as exponents only");
  auto experts = buffer_->experts(given.numExperts);
  throwIfError(experts.status());
  const auto local = int64_t((*experts)->numLocal(rank()));

  const auto handle = std::make_shared<ep::Handle>();
  handle->shape = {size_, given.numExperts, size_t(maxTokens), size_t(x.size(1))};
  handle->experts = *experts;
  handle->tokens = size_t(x.size(0));
  handle->chosen = chosenExperts(given.topk, x.size(0), given.numExperts);
  handle->topk = size_t(given.topk.size(1));
  throwIfError(ep::checkRepeated(**experts, handle->chosen, size_t(maxTokens), rank()));
  throwIfError(buffer_->checkRoom(handle->shape, **experts));
  throwIfError(buffer_->checkTable(handle->tokens, handle->topk, given.numExperts));
  ep::DispatchCall call;
  call.mask = mask(given.activeRanks);
  if (given.addedCounts) requireTensor(*given.addedCounts, "cumulative stats", at::kInt, {local});
  if (given.waits) requireTensor(*given.waits, "wait stats", at::kLong, {size_});

  const int64_t rows = size_ * maxTokens, hidden = x.size(1);
  call.format = !given.usesFp8      ? ep::RowFormat::kBf16
                : given.roundsScale ? ep::RowFormat::kFp8Rounded
                                    : ep::RowFormat::kFp8;
  call.packsScales = given.packsScales;
  call.handle = handle;
  call.deadline = deadlineIn(options_.timeout);
  call.patience = patienceOf(given.timeoutMicros);
  call.x = reinterpret_cast<const uint16_t*>(x.const_data_ptr());
  call.rows = buffer_->nextRecv();
  Dispatch made;
  made.rows = inMemory(call.rows, {local, rows, hidden}, {rows * hidden, hidden, 1},
                       given.usesFp8 ? at::kFloat8_e4m3fn : at::kBFloat16);
  if (given.usesFp8) {
    const auto words = int64_t(ep::scaleWordsOf(size_t(hidden), given.packsScales));
    call.scales = call.rows + ep::BufferLayout::scalesOffset(size_t(local * rows), size_t(hidden));
    made.scales = inMemory(call.scales, {local, rows, words}, {words * rows, 1, rows},
                           given.packsScales ? at::kInt : at::kFloat);
  }
  made.counts = at::empty({local}, at::kInt);
  made.sources = at::empty({local, rows}, at::kInt);
  made.ranges = at::empty({local, size_}, at::kLong);
  made.handle = {buffer_, handle};
  call.counts = made.counts.mutable_data_ptr<int32_t>();
  call.sources = made.sources.mutable_data_ptr<int32_t>();
  call.ranges = made.ranges.mutable_data_ptr<int64_t>();
  if (given.addedCounts) call.addedCounts = given.addedCounts->mutable_data_ptr<int32_t>();
  if (given.waits) call.waits = given.waits->mutable_data_ptr<int64_t>();
  made.run = [call = std::move(call), activeRanks = given.activeRanks, size = size_,
              kept = std::vector<at::Tensor>{x, made.counts, made.sources, made.ranges,
                                             orEmpty(given.addedCounts), orEmpty(given.waits)}](
                 ep::Memory& memory) mutable -> Status {
    ep::Ending ending;
    MOONCAKE_TRY(ep::dispatch(memory, call, ending));
    if (activeRanks) clearOthers(*activeRanks, size, ending.participants);
    return Status();
  };
  return made;
}

EpBuffer::Combine EpBuffer::combine(const CombineArguments& given) {
  const ep::Handle& of = *given.handle.dispatch;
  TORCH_CHECK_VALUE(given.handle.buffer == buffer_,
                    "the handle is of a dispatch of another buffer");
  TORCH_CHECK_VALUE(!(given.usesLogfmt && given.zeroCopy),
                    "use_logfmt and zero_copy exclude each other: zero_copy sends the rows as they "
                    "are in the buffer");
  const ep::Shape& shape = of.shape;
  const auto local = int64_t(of.experts->numLocal(rank()));
  const int64_t rows = size_ * int64_t(shape.maxTokens), hidden = int64_t(shape.hidden);
  const auto tokens = int64_t(of.tokens), topks = int64_t(of.topk);
  requireTensor(given.weights, "topk_weights", at::kFloat, {tokens, topks});
  ep::CombineCall call;
  call.chosen = chosenExperts(given.topk, tokens, shape.numExperts);
  TORCH_CHECK_VALUE(given.topk.size(1) == topks, "topk_idx has ", given.topk.size(1),
                    " experts per token, the dispatch had ", topks);
  for (size_t i = 0; i < call.chosen.size(); ++i) {
    TORCH_CHECK_VALUE(call.chosen[i] == of.chosen[i] || call.chosen[i] == ep::kNoExpert,
                      "topk_idx: token ", i / of.topk, " chooses expert ", call.chosen[i],
                      ", at its dispatch it chose ", of.chosen[i]);
  }
  call.mask = mask(given.activeRanks);
  if (given.waits) requireTensor(*given.waits, "wait stats", at::kLong, {size_});
  if (given.out) requireTensor(*given.out, "out", at::kBFloat16, {tokens, hidden});
  if (given.zeroCopy) {
    TORCH_CHECK_VALUE(inPlace_,
                      "zero_copy: call get_next_combine_buffer() before each combine, and write "
                      "the rows into the tensor that it returns");
    call.isInPlace = true;
    call.expectedNumber = inPlace_->number;
    call.rowStride = ep::combineRowBytes(shape.hidden);
    call.x = inPlace_->data;
  } else {
    requireTensor(given.x, "x", at::kBFloat16, {local, rows, hidden});
    call.rowStride = ep::bf16Bytes(shape.hidden);
    call.x = static_cast<const std::byte*>(given.x.const_data_ptr());
  }
  call.usesLogfmt = given.usesLogfmt;
  call.renormalizes = options_.renormalizes;
  call.weights = given.weights.const_data_ptr<float>();
  call.deadline = deadlineIn(options_.timeout);
  call.patience = patienceOf(given.timeoutMicros);
  call.handle = given.handle.dispatch;
  Combine made;
  made.sums = given.out ? *given.out : at::empty({tokens, hidden}, at::kBFloat16);
  made.missing = at::empty({tokens}, at::kBool);
  // In mode `raise`, a call that ends with a loss must not change the caller's tensor.
  const at::Tensor sum = given.out && options_.raises ? at::empty_like(*given.out) : made.sums;
  call.combined = reinterpret_cast<uint16_t*>(sum.mutable_data_ptr());
  call.missing = made.missing.mutable_data_ptr<bool>();
  if (given.waits) call.waits = given.waits->mutable_data_ptr<int64_t>();
  inPlace_.reset();
  made.run =
      [call = std::move(call), activeRanks = given.activeRanks, size = size_, sum,
       target = made.sums,
       kept = std::vector<at::Tensor>{given.x, given.weights, made.missing, orEmpty(given.waits)}](
          const ep::Memory& memory) mutable -> Status {
    ep::Ending ending;
    MOONCAKE_TRY(ep::combine(memory, call, ending));
    if (!sum.is_same(target))
      std::memcpy(target.mutable_data_ptr(), sum.const_data_ptr(), sum.nbytes());
    if (activeRanks) clearOthers(*activeRanks, size, ending.participants);
    return Status();
  };
  return made;
}

std::shared_ptr<EpWork> EpBuffer::submit(Run run, bool inBackground) {
  CallInterrupt interrupt(buffer_->group());
  auto task = buffer_->submit(std::move(run), inBackground);
  interrupt.rethrow();
  if (!inBackground) throwIfError(task->status());
  return std::make_shared<EpWork>(buffer_, std::move(task));
}

at::Tensor EpBuffer::nextCombineBuffer(const EpHandle& handle) {
  TORCH_CHECK_VALUE(handle.buffer == buffer_, "the handle is of a dispatch of another buffer");
  auto next = buffer_->nextSend(deadlineIn(options_.timeout));
  throwIfError(next.status());
  inPlace_ = *next;
  const ep::Shape& shape = handle.dispatch->shape;
  const auto local = int64_t(handle.dispatch->experts->numLocal(rank()));
  const int64_t rows = size_ * int64_t(shape.maxTokens);
  const auto stride = int64_t(ep::combineRowBytes(shape.hidden) / sizeof(uint16_t));
  return inMemory(inPlace_->data, {local, rows, int64_t(shape.hidden)}, {rows * stride, stride, 1},
                  at::kBFloat16);
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
}

std::vector<bool> EpBuffer::maskedRanks() const {
  const GroupRanks active = buffer_->callerMask() & buffer_->view();
  std::vector<bool> masked;
  for (int r = 0; r < size_; ++r) masked.push_back(!active.contains(r));
  return masked;
}

std::vector<bool> EpBuffer::activeRanks() const {
  const GroupRanks view = buffer_->view();
  std::vector<bool> active;
  for (int r = 0; r < size_; ++r) active.push_back(view.contains(r));
  return active;
}

at::Tensor EpBuffer::localBuffer() const {
  return inMemory(buffer_->data(), {int64_t(buffer_->bytes())}, {1}, at::kByte);
}

void EpBuffer::updateMembers() const { throwIfError(buffer_->group().usable()); }

void EpBuffer::close(Seconds timeout) { buffer_->close(deadlineIn(timeout)); }

size_t EpBuffer::sizeHint(size_t maxTokens, size_t hidden, int ranks, int experts) {
  TORCH_CHECK_VALUE(ranks > 0 && experts > 0, "at least one rank and one expert");
  return ep::sizeHint({ranks, experts, maxTokens, hidden});
}

Deadline EpBuffer::deadlineIn(Seconds timeout) {
  return Deadline::after(std::chrono::duration_cast<Clock::duration>(timeout));
}

// The ranks that this rank counts as active in a call.
GroupRanks EpBuffer::mask(const std::optional<at::Tensor>& activeRanks) const {
  GroupRanks mask = buffer_->callerMask();
  if (activeRanks) mask &= maskOf(*activeRanks, size_);
  return mask;
}

// Empty: no rank is skipped before the buffer's timeout.
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
