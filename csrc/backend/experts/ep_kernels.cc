#include "backend/experts/ep_kernels.h"

#include <cstring>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include "backend/arguments.h"
#include "backend/device/accelerator_of.h"
#include "backend/device/keep_until_passed.h"
#include "backend/errors.h"
#include "backend/experts/ep_kernel_work.h"
#include "base/log.h"

namespace mooncake {
namespace {

constexpr const char* kBeforeTheCapture =
    "Call low_latency_dispatch() with as many experts, on tensors of the device, before the "
    "capture";

template <typename T>
T* addressOf(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->mutable_data_ptr<T>() : nullptr;
}

void add(std::vector<at::Tensor>& tensors, const std::optional<at::Tensor>& tensor) {
  if (tensor) tensors.push_back(*tensor);
}

}  // namespace

EpKernels::EpKernels(KernelControl control, Settings settings)
    : control_(std::move(control)),
      settings_(std::move(settings)),
      rank_(control_.group->rank()),
      size_(control_.group->size()),
      maskBits_(~uint64_t(0) >> (64 - size_)),
      calls_({.log = settings_.name,
              .owner = "the Buffer",
              .variable = "MOONCAKE_EP_KERNELS",
              .setUp = kBeforeTheCapture,
              .oneDevice = "Use one device for each Buffer"}) {}

EpKernels::~EpKernels() = default;

bool EpKernels::takes(const c10::Device& device) {
  if (!calls_.takes(device, experts_, control_, settings_.bytes, settings_.timeout)) return false;
  if (!mask_.defined())
    mask_ = at::full({1}, int64_t(maskBits_), at::TensorOptions(at::kLong).device(device));
  return true;
}

// The table stands on the device before the next kernel of our stream. The host waits for its copy,
// which waits for nothing.
at::Tensor EpKernels::tableFor(const std::shared_ptr<const ep::ExpertMap>& experts) {
  constexpr size_t kMostTables = 16;
  for (const Table& table : tables_)
    if (table.experts == experts || table.experts->owners() == experts->owners())
      return table.onDevice;
  const c10::Stream callers = currentOn(stream().device());
  if (isCapturing(callers))
    refuseRecording(callers, "it has other experts than the calls before", kBeforeTheCapture);
  const auto bytes = PeerExperts::tableOf(experts->owners(), rank_);
  const c10::StreamGuard on(calls_.prompt());
  at::Tensor host = at::empty({int64_t(bytes.size())}, at::kByte);
  std::memcpy(host.mutable_data_ptr(), bytes.data(), bytes.size());
  tables_.push_front({experts, host.to(stream().device())});
  if (tables_.size() > kMostTables) tables_.pop_back();
  return tables_.front().onDevice;
}

PeerExperts::Shape EpKernels::shapeOf(const ep::Handle& handle) const {
  const ep::Shape& shape = handle.shape;
  return {.maxTokens = shape.maxTokens,
          .hidden = shape.hidden,
          .combineRow = ep::combineRowBytes(shape.hidden),
          .experts = unsigned(shape.numExperts),
          .local = unsigned(handle.experts->numLocal(rank_)),
          .mostLocal = unsigned(handle.experts->mostLocal()),
          .owners = handle.experts->hash()};
}

PeerExperts::Caller EpKernels::callerOf(const at::Tensor& topk,
                                        const std::optional<at::Tensor>& activeRanks,
                                        const std::optional<at::Tensor>& waits,
                                        const EpKept& kept) const {
  return {.topk = topk.const_data_ptr(),
          .isTopkWide = topk.scalar_type() == at::kLong,
          .tokens = size_t(topk.size(0)),
          .topks = size_t(topk.size(1)),
          .mask = reinterpret_cast<const uint64_t*>(mask_.const_data_ptr()),
          .activeRanks = addressOf<int32_t>(activeRanks),
          .waits = addressOf<int64_t>(waits),
          .table = static_cast<const std::byte*>(kept.table.const_data_ptr()),
          .kept = static_cast<std::byte*>(kept.kept.mutable_data_ptr())};
}

void EpKernels::setMask(const GroupRanks& active) {
  maskBits_ = 0;
  for (int rank = 0; rank < size_; ++rank)
    if (active.contains(rank)) maskBits_ |= uint64_t(1) << rank;
  if (!experts_) return;
  const c10::DeviceGuard on(stream().device());
  const c10::Stream callers = currentOn(stream().device());
  if (isCapturing(callers)) refuseCapture(callers, "a mask is not recorded");
  // Behind the kernels of earlier calls, and ahead of later replays.
  calls_.submit(callers, /*isRecorded=*/false, [&](const c10::Stream& ours) {
    const c10::StreamGuard current(ours);
    mask_.fill_(int64_t(maskBits_));
  });
  placeBehind(callers, stream());
}

EpKernels::Call EpKernels::dispatch(const Dispatch& given, const ep::Handle& handle, EpKept& kept) {
  using RowKind = PeerExperts::RowKind;
  const c10::DeviceGuard on(stream().device());
  kept.shape = shapeOf(handle);
  kept.table = tableFor(handle.experts);
  const size_t bytes = experts_->keptBytes(kept.shape, handle.tokens, handle.topk);
  kept.kept = at::empty({int64_t(bytes)}, at::TensorOptions(at::kByte).device(stream().device()));
  const PeerExperts::Dispatch dispatch{
      .shape = kept.shape,
      .caller = callerOf(given.topk, given.activeRanks, given.waits, kept),
      .x = given.x.const_data_ptr(),
      .kind = given.format == ep::RowFormat::kBf16  ? RowKind::kBf16
              : given.format == ep::RowFormat::kFp8 ? RowKind::kFp8
                                                    : RowKind::kFp8Rounded,
      .packsScales = given.packsScales,
      .rows = given.rows.mutable_data_ptr(),
      .scales = given.scales ? given.scales->mutable_data_ptr() : nullptr,
      .counts = given.counts.mutable_data_ptr<int32_t>(),
      .sources = given.sources.mutable_data_ptr<int32_t>(),
      .ranges = given.ranges.mutable_data_ptr<int64_t>(),
      .addedCounts = addressOf<int32_t>(given.addedCounts)};
  Call call{.tensors = {given.x, given.topk, given.rows, given.counts, given.sources, given.ranges,
                        kept.kept},
            .table = kept.table,
            .send = [dispatch](PeerExperts& experts, const PeerExperts::Limits& limits) {
              return experts.send(dispatch, limits);
            }};
  for (const auto& one : {given.activeRanks, given.addedCounts, given.waits, given.scales})
    add(call.tensors, one);
  return call;
}

EpKernels::Call EpKernels::combine(const Combine& given, const EpKept& kept) {
  if (given.isInPlace) {
    const bool isNext = experts_->guard().lastCall() + 1 == nextNumber_ &&
                        !experts_->queue().hasGraphs() &&
                        !isCapturing(currentOn(stream().device()));
    if (!isNext) {
      throwError({ErrorCode::kInvalidArgument,
                  "combine: the buffer that the rows were written to belongs to another operation: "
                  "call combine before anything else is called on this buffer"});
    }
    if (kept.shape.mostLocal != nextMostLocal_) {
      throwError({ErrorCode::kInvalidArgument,
                  "combine: the buffer that the rows were written to is for another handle"});
    }
  }
  const PeerExperts::Combine combine{
      .shape = kept.shape,
      .caller = callerOf(given.topk, given.activeRanks, given.waits, kept),
      .x = given.isInPlace ? nullptr : given.x.const_data_ptr(),
      .weights = given.weights.const_data_ptr<float>(),
      .usesLogfmt = given.usesLogfmt,
      .renormalizes = settings_.renormalizes,
      .sums = given.sums.mutable_data_ptr(),
      .missing = given.missing.mutable_data_ptr<bool>()};
  Call call{.tensors = {given.topk, given.weights, given.sums, given.missing, kept.kept},
            .table = kept.table,
            .send = [combine](PeerExperts& experts, const PeerExperts::Limits& limits) {
              return experts.send(combine, limits);
            }};
  if (!given.isInPlace) call.tensors.push_back(given.x);
  for (const auto& one : {given.activeRanks, given.waits}) add(call.tensors, one);
  return call;
}

std::shared_ptr<EpWork> EpKernels::submit(Call call, const PeerExperts::Limits& limits,
                                          bool isHooked, bool waits) {
  const c10::DeviceGuard on(stream().device());
  const c10::Stream callers = currentOn(stream().device());
  const bool isRecorded = isCapturing(callers);
  throwIfError(experts_->guard().usable());
  receive(experts_->sent());
  const c10::Stream& ours = calls_.stream(isRecorded);
  auto work = std::make_shared<EpKernelWork>(
      EpKernelWork::Of{.kernels = shared_from_this(),
                       .guard = experts_->guard(),
                       .stream = ours,
                       .blocks = settings_.blocks,
                       .isRecorded = isRecorded,
                       .receive = [this](uint64_t sent) { receive(sent); }});
  const uint64_t number = calls_.submit(callers, isRecorded, [&](const c10::Stream&) {
    return orThrow(call.send(*experts_, limits));
  });
  work->sent(number, experts_->sent());
  call.tensors.push_back(call.table);
  pending_ = {std::move(call.tensors), isRecorded};
  if (isRecorded) recordedTables_.push_back(std::move(call.table));
  isHooked ? placeBehind(callers, ours) : work->receive();
  if (waits) work->wait();
  return work;
}

// The program may drop the tensors before that.
void EpKernels::receive(uint64_t sent) {
  if (experts_->sent() != sent || pending_.tensors.empty()) return;
  const c10::Stream callers = currentOn(stream().device());
  if (pending_.isRecorded && !calls_.isRecording()) {
    log(LogLevel::kWarning, settings_.name,
        "a graph was recorded without the hook of its last call: replaying it ends the buffer");
    pending_ = {};
    return experts_->drop();
  }
  if (pending_.isRecorded != isCapturing(callers)) {
    refuseRecording(callers, "an operation of the Buffer before it has not been received",
                    "Call its hook on the same side of the begin and end of the capture");
  }
  calls_.submit(callers, pending_.isRecorded, [&](const c10::Stream& ours) {
    const Status received = experts_->receive();
    keepUntilPassed(std::exchange(pending_, {}).tensors, ours);
    throwIfError(received);
  });
}

std::optional<at::Tensor> EpKernels::nextRows(const EpKept& kept) {
  const c10::DeviceGuard on(stream().device());
  if (isCapturing(currentOn(stream().device()))) return std::nullopt;
  receive(experts_->sent());
  const auto next = experts_->nextRows(kept.shape);
  if (!next.rows) return std::nullopt;
  nextNumber_ = next.number;
  nextMostLocal_ = kept.shape.mostLocal;
  // The operation before has ended on this rank, so no rank reads these rows.
  placeBehind(currentOn(stream().device()), stream());
  const auto stride = int64_t(kept.shape.combineRow / sizeof(uint16_t));
  const auto rows = int64_t(size_) * int64_t(kept.shape.maxTokens);
  return at::for_blob(next.rows, {int64_t(kept.shape.local), rows, int64_t(kept.shape.hidden)})
      .strides({rows * stride, stride, 1})
      .deleter([keeps = shared_from_this()](void*) {})
      .options(at::TensorOptions(at::kBFloat16).device(stream().device()))
      .target_device(stream().device())
      .make_tensor();
}

void EpKernels::close(Deadline deadline) {
  if (!experts_) return;
  const c10::DeviceGuard on(stream().device());
  if (!pending_.isRecorded) receive(experts_->sent());
  calls_.drain(deadline);
}

}  // namespace mooncake
