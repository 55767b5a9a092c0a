#include "backend/device/device_work.h"

#include <algorithm>
#include <thread>
#include <utility>

#include <c10/core/StreamGuard.h>

#include "backend/batch_work.h"
#include "backend/collective_work.h"
#include "backend/device/device_scope.h"
#include "backend/device/group_streams.h"
#include "backend/errors.h"
#include "backend/message_work.h"
#include "backend/signals.h"

namespace mooncake {
namespace {

constexpr std::chrono::microseconds kPause(50);

// Ends the profiler's events of a work and its parts.
void endProfile(c10d::Work& work) {
  if (auto* const collective = dynamic_cast<CollectiveWork*>(&work)) collective->endProfile();
  if (auto* const message = dynamic_cast<MessageWork*>(&work)) message->endProfile();
  if (const auto* const batch = dynamic_cast<BatchWork*>(&work)) {
    for (const auto& part : batch->works()) endProfile(*part);
  }
}

}  // namespace

DeviceWork::DeviceWork(int rank, c10d::OpType type, WorkPtr host,
                       std::vector<std::shared_ptr<Staging>> stagings,
                       std::vector<at::Tensor> outputs, Waiting waiting)
    : Work(rank, type),
      host_(std::move(host)),
      stagings_(std::move(stagings)),
      outputs_(std::move(outputs)),
      waiting_(std::move(waiting)) {
  // The program is through with the call when it has been enqueued, and may stop its profiler.
  if (waitsOnHost()) return;
  endProfile(*host_);
  // An operation may change its outputs although no caller waits for it.
  if (isOrdered()) watchError();
}

bool DeviceWork::isCompleted() {
  return host_->isCompleted() && (!host_->isSuccess() || hasOutputs());
}

bool DeviceWork::isSuccess() const { return host_->isSuccess() && hasOutputs(); }

bool DeviceWork::hasOutputs() const {
  return std::ranges::all_of(stagings_, [](const auto& staging) {
    const DeviceScope on(staging->stream().device());
    return staging->isOver();
  });
}

std::exception_ptr DeviceWork::exception() const {
  std::exception_ptr error = host_->exception();
  if (error) *isRaised_ = true;
  return error;
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  const bool hasTimeout = timeout > kNoTimeout;
  const Deadline deadline = Deadline::after(hasTimeout ? timeout : waiting_.limit);
  const bool awaitsEnd = waitsOnHost() || waiting_.blocks;
  if (!awaitsEnd) watchError();
  if (const auto error = takeEarlier()) {
    // The error of this operation, if there is one, stays for the next call.
    block();
    std::rethrow_exception(error);
  }
  if (awaitsEnd || host_->isCompleted()) awaitHost(timeout);
  block();
  // Without a timeout, the operation has one of its own, which does not count for the outputs.
  if (waiting_.blocks) awaitOutputs(hasTimeout ? deadline : Deadline::after(waiting_.limit));
  return true;
}

std::exception_ptr DeviceWork::takeEarlier() {
  const UnseenErrors::Unseen& earlier = waiting_.earlier;
  return earlier.error && !earlier.isRaised->exchange(true) ? earlier.error : nullptr;
}

void DeviceWork::awaitHost(std::chrono::milliseconds timeout) {
  try {
    host_->wait(timeout);
  } catch (...) {
    if (host_->isCompleted()) *isRaised_ = true;
    // An ordered staging copies the outputs in any case, and other messages of a batch have data.
    // Later work of the program comes after.
    for (const auto& staging : stagings_) staging->settle();
    block();
    throw;
  }
  for (const auto& staging : stagings_) staging->settle();
}

// All waits of an operation are bounded, so this one is.
void DeviceWork::awaitVerdict() const {
  const WaitInterrupt interrupt;
  while (!host_->isCompleted()) {
    std::this_thread::sleep_for(kPause);
    Interruptible::look();
    interrupt.rethrow();
  }
}

void DeviceWork::watchError() {
  std::call_once(watched_, [&] { waiting_.unseen->add(host_, isRaised_); });
}

bool DeviceWork::waitsOnHost() const {
  return waiting_.onHost ||
         !std::ranges::all_of(stagings_, [](const auto& s) { return s->canBlockEarly(); });
}

bool DeviceWork::isOrdered() const {
  return std::ranges::all_of(stagings_, [](const auto& s) { return s->isOrdered(); });
}

void DeviceWork::block() const {
  for (const auto& staging : stagings_) staging->block();
}

void DeviceWork::awaitOutputs(Deadline deadline) const {
  const WaitInterrupt interrupt;
  for (const auto& staging : stagings_) {
    const DeviceScope on(staging->stream().device());
    while (!staging->isOver()) {
      if (deadline.passed()) {
        throwError({ErrorCode::kTimeout,
                    "the outputs of an operation are not on " + staging->stream().device().str() +
                        " after the timeout of wait(): earlier work of the device still runs"});
      }
      std::this_thread::sleep_for(kPause);
      Interruptible::look();
      interrupt.rethrow();
    }
  }
}

c10::intrusive_ptr<c10::ivalue::Future> DeviceWork::getFuture() {
  std::vector<c10::Device> devices;
  for (const auto& staging : stagings_) devices.push_back(staging->stream().device());
  const auto type = c10::ListType::create(c10::TensorType::get());
  auto future = c10::make_intrusive<c10::ivalue::Future>(type, std::move(devices));
  if (const auto error = takeEarlier()) {
    future->setError(error);
    return future;
  }
  if (host_->isCompleted() && !host_->isSuccess()) {
    future->setError(exception());
    return future;
  }
  // Later operations wait on the stream of an ordered staging already.
  const Staging& last = *stagings_.back();
  const c10::Stream& values = isOrdered() ? last.streams().callbacks() : last.stream();
  if (hasFuturesAtOnce()) {
    // It is complete at once, at a position in a stream that comes after the outputs.
    const c10::StreamGuard on(values);
    block();
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }
  host_->getFuture()->addCallback([future, stagings = stagings_, outputs = outputs_,
                                   isRaised = isRaised_, values](c10::ivalue::Future& host) {
    if (host.hasError()) {
      *isRaised = true;
      future->setError(host.exception_ptr());
      return;
    }
    try {
      // The future records the position of the current stream.
      const c10::StreamGuard on(values);
      for (const auto& staging : stagings) {
        staging->giveBack();
        staging->block();
      }
      future->markCompleted(c10::IValue(outputs));
    } catch (const std::exception&) {  // of torch, on a thread of ours
      future->setErrorIfNeeded(std::current_exception());
    }
  });
  return future;
}

}  // namespace mooncake
