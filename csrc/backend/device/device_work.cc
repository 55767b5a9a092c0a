#include "backend/device/device_work.h"

#include <algorithm>
#include <thread>
#include <utility>

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include "backend/collective_work.h"
#include "backend/device/group_streams.h"
#include "backend/errors.h"

namespace mooncake {
namespace {

constexpr std::chrono::microseconds kPause(50);
constexpr auto kEndless = std::chrono::milliseconds::max();

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
  auto* const collective = dynamic_cast<CollectiveWork*>(host_.get());
  if (collective && !waitsOnHost()) collective->endProfile();
}

bool DeviceWork::isCompleted() {
  if (!host_->isCompleted()) return false;
  return !host_->isSuccess() ||
         std::ranges::all_of(stagings_, [](const auto& staging) { return staging->isOver(); });
}

bool DeviceWork::isSuccess() const {
  return host_->isSuccess() &&
         std::ranges::all_of(stagings_, [](const auto& staging) { return staging->isOver(); });
}

std::exception_ptr DeviceWork::exception() const {
  std::exception_ptr error = host_->exception();
  if (error && waiting_.isRaised) *waiting_.isRaised = true;
  return error;
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout == kNoTimeout ? kEndless : timeout);
  if (const auto error = takeEarlier()) {
    // The error of this operation, if there is one, stays for the next call.
    block();
    std::rethrow_exception(error);
  }
  if (waitsOnHost() || waiting_.blocks || host_->isCompleted()) awaitHost(timeout);
  block();
  if (waiting_.blocks) awaitOutputs(deadline);
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
    if (waiting_.isRaised && host_->isCompleted()) *waiting_.isRaised = true;
    // An ordered staging copies the outputs in any case. Later work of the program comes after.
    block();
    throw;
  }
  for (const auto& staging : stagings_) staging->giveBack();  // of messages; else it was done
}

bool DeviceWork::waitsOnHost() const {
  // The program wants the host to wait for a barrier. A batch may hold calls without a staging.
  return opType_ == c10d::OpType::BARRIER || opType_ == c10d::OpType::COALESCED ||
         !std::ranges::all_of(stagings_, [](const auto& staging) { return staging->isOrdered(); });
}

void DeviceWork::block() const {
  for (const auto& staging : stagings_) staging->block();
}

void DeviceWork::awaitOutputs(Deadline deadline) const {
  for (const auto& staging : stagings_) {
    const c10::DeviceGuard on(staging->stream().device());
    while (!staging->isOver()) {
      if (deadline.passed()) {
        throwError({ErrorCode::kTimeout,
                    "the outputs of an operation are not on " + staging->stream().device().str() +
                        " after the timeout of wait(): earlier work of the device still runs"});
      }
      std::this_thread::sleep_for(kPause);
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
  if (!waitsOnHost()) {
    // It is complete at once, at a position in a stream that comes after the outputs.
    const c10::StreamGuard on(stagings_.back()->streams().callbacks());
    block();
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }
  host_->getFuture()->addCallback([future, stagings = stagings_, outputs = outputs_,
                                   isRaised = waiting_.isRaised](c10::ivalue::Future& host) {
    if (host.hasError()) {
      if (isRaised) *isRaised = true;
      future->setError(host.exception_ptr());
      return;
    }
    try {
      // The future records the position of the current stream.
      const c10::StreamGuard on(stagings.back()->stream());
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
