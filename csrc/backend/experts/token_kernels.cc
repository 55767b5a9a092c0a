#include "backend/experts/token_kernels.h"

#include <exception>
#include <span>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "backend/arguments.h"
#include "backend/device/accelerator_of.h"
#include "backend/device/keep_until_passed.h"
#include "backend/errors.h"
#include "backend/experts/ep_kernel_work.h"
#include "base/log.h"

namespace mooncake {
namespace {

using kernels::Dispatched;

std::vector<kernels::Field> partsOf(const TokenKernels::Fields& fields) {
  std::vector<kernels::Field> parts;
  for (size_t i = 0; i < fields.given.size(); ++i) {
    const at::Tensor& given = fields.given[i];
    parts.push_back({.from = static_cast<const unsigned char*>(given.const_data_ptr()),
                     .to = static_cast<unsigned char*>(fields.made[i].mutable_data_ptr()),
                     .bytes = size_t(given.size(1)) * given.itemsize()});
  }
  return parts;
}

// All tensors of a call, which the allocator must keep for its kernel.
std::vector<at::Tensor> tensorsOf(const TokenKernels::Fields& fields, const TokenHandle& handle) {
  std::vector<at::Tensor> tensors{handle.choices, handle.counts, handle.ends, handle.sources,
                                  handle.dispatched};
  tensors.insert(tensors.end(), fields.given.begin(), fields.given.end());
  tensors.insert(tensors.end(), fields.made.begin(), fields.made.end());
  return tensors;
}

}  // namespace

TokenKernels::TokenKernels(KernelControl control, Settings settings)
    : control_(std::move(control)),
      settings_(std::move(settings)),
      calls_({.log = settings_.name,
              .owner = "the Buffer",
              .variable = "MOONCAKE_EP_KERNELS",
              .setUp = kOutsideOfCapture,
              .oneDevice = "Use one device for each Buffer"}) {}

TokenKernels::~TokenKernels() {
  try {
    close(Deadline::after(settings_.timeout));
  } catch (const std::exception& error) {  // the device is lost
    log(LogLevel::kWarning, settings_.name, "at the end of its kernels: ", error.what());
  }
}

bool TokenKernels::takes(const c10::Device& device) {
  if (!calls_.takes(device, tokens_, control_, settings_.bytes, settings_.timeout)) return false;
  if (!mask_.defined())
    mask_ = at::full({1}, int64_t(-1), at::TensorOptions(at::kLong).device(device));
  return true;
}

PeerTokens::Caller TokenKernels::callerOf(const Call& call, const TokenHandle& handle) const {
  return {
      .tokens = size_t(handle.tokens),
      .choices = static_cast<const kernels::Choice*>(handle.choices.const_data_ptr()),
      .mask = static_cast<const uint64_t*>(mask_.const_data_ptr()),
      .among = call.among,
      .activeRanks = call.activeRanks ? call.activeRanks->mutable_data_ptr<int32_t>() : nullptr};
}

template <typename Send>
std::shared_ptr<EpWork> TokenKernels::submit(const Call& call, std::vector<at::Tensor> tensors,
                                             const Send& send) {
  const c10::DeviceGuard on(stream().device());
  const c10::Stream callers = currentOn(stream().device());
  refuseCapture(callers, "the normal mode is not recorded");
  throwIfError(tokens_->guard().usable());
  auto work = std::make_shared<EpKernelWork>(EpKernelWork::Of{.kernels = shared_from_this(),
                                                              .guard = tokens_->guard(),
                                                              .stream = stream(),
                                                              .blocks = settings_.blocks});
  work->sent(calls_.submit(callers, /*isRecorded=*/false,
                           [&](const c10::Stream&) { return orThrow(send()); }));
  if (call.activeRanks) tensors.push_back(*call.activeRanks);
  keepUntilPassed(tensors, stream());
  work->receive();
  if (call.waits) work->wait();
  return work;
}

std::shared_ptr<EpWork> TokenKernels::dispatch(const Call& call, const Fields& fields,
                                               TokenHandle& handle, const at::Tensor& table,
                                               int64_t weights) {
  throwIfError(tokens_->checkCombine(handle.shape, size_t(handle.hidden), size_t(weights)));
  handle.kernels = shared_from_this();
  auto tensors = tensorsOf(fields, handle);
  tensors.push_back(table);
  return submit(call, std::move(tensors), [&] {
    const auto parts = partsOf(fields);
    auto number = tokens_->dispatch(
        {.shape = handle.shape,
         .caller = callerOf(call, handle),
         .fields = parts,
         .agreed = fields.agreed,
         .counts = handle.counts.const_data_ptr<int32_t>(),
         .capacity = size_t(handle.capacity),
         .sources = handle.sources.mutable_data_ptr<int32_t>(),
         .ends = handle.ends.mutable_data_ptr<int32_t>(),
         .table = table.mutable_data_ptr<int32_t>(),
         .dispatched = static_cast<Dispatched*>(handle.dispatched.mutable_data_ptr())},
        call.limit);
    if (number.ok()) handle.number = *number;
    return number;
  });
}

std::shared_ptr<EpWork> TokenKernels::dispatchAgain(const Call& call, const Fields& fields,
                                                    const TokenHandle& handle) {
  return submit(call, tensorsOf(fields, handle), [&] {
    const auto parts = partsOf(fields);
    return tokens_->dispatch(
        {.shape = handle.shape,
         .caller = callerOf(call, handle),
         .fields = parts,
         .agreed = fields.agreed,
         .counts = handle.counts.const_data_ptr<int32_t>(),
         .capacity = size_t(handle.capacity),
         .earlier = static_cast<const Dispatched*>(handle.dispatched.const_data_ptr()),
         .earlierEnds = handle.ends.const_data_ptr<int32_t>()},
        call.limit);
  });
}

std::shared_ptr<EpWork> TokenKernels::combine(const Call& call, const Sums& sums,
                                              const TokenHandle& handle) {
  std::vector<at::Tensor> tensors{handle.choices, handle.ends, handle.sources, handle.dispatched,
                                  sums.x,         sums.sums,   sums.missing};
  tensors.insert(tensors.end(), sums.biases.begin(), sums.biases.end());
  std::vector<const void*> biases;
  for (const at::Tensor& bias : sums.biases) biases.push_back(bias.const_data_ptr());
  for (const auto& one : {sums.weights, sums.weightSums})
    if (one) tensors.push_back(*one);
  return submit(call, std::move(tensors), [&] {
    return tokens_->combine(
        {.shape = handle.shape,
         .caller = callerOf(call, handle),
         .hidden = size_t(handle.hidden),
         .weightCount = sums.weights ? unsigned(sums.weights->size(1)) : 0,
         .x = sums.x.const_data_ptr(),
         .weights = sums.weights ? sums.weights->const_data_ptr<float>() : nullptr,
         .capacity = size_t(handle.capacity),
         .sources = handle.sources.const_data_ptr<int32_t>(),
         .ends = handle.ends.const_data_ptr<int32_t>(),
         .dispatched = static_cast<const Dispatched*>(handle.dispatched.const_data_ptr()),
         .biases = biases,
         .sums = sums.sums.mutable_data_ptr(),
         .weightSums = sums.weightSums ? sums.weightSums->mutable_data_ptr<float>() : nullptr,
         .missing = sums.missing.mutable_data_ptr<bool>()},
        call.limit);
  });
}

void TokenKernels::fail(Error why) {
  if (tokens_) tokens_->guard().fail(std::move(why));
}

void TokenKernels::close(Deadline deadline) {
  if (!tokens_) return;
  const c10::DeviceGuard on(stream().device());
  calls_.drain(deadline);
}

}  // namespace mooncake
