#include "backend/device/kernel_calls.h"

#include <exception>

#include "backend/arguments.h"
#include "backend/device/accelerator_of.h"
#include "base/log.h"

namespace mooncake {

KernelControl KernelControl::make(const MakeGroup& makeGroup) {
  auto view = std::make_shared<ViewFeed>();
  auto group = makeGroup([view](const GroupView& shown) { view->show(shown); });
  return {std::move(group), std::move(view)};
}

void KernelCalls::refuseUndecided(const c10::Stream& callers) const {
  refuseRecording(callers, std::string(names_.owner) + " has not set up its kernels yet",
                  names_.setUp);
}

KernelCalls::Place KernelCalls::begin(const c10::Device& device) {
  const c10::Stream callers = currentOn(device);
  if (isCapturing(callers)) refuseUndecided(callers);
  isDecided_ = true;
  Result<Accelerator*> accelerator = acceleratorOf(device.type());
  try {
    own_.emplace(device, StreamRole::kFollows, callers);
    return {accelerator, accelerator.ok() ? own_->native() : DeviceStream{}};
  } catch (const std::exception& error) {
    return {Error{ErrorCode::kExhausted, std::string("no stream: ") + error.what()}, {}};
  }
}

KernelCalls::Place KernelCalls::begin(std::shared_ptr<GroupStreams> streams) {
  isDecided_ = true;
  streams_ = std::move(streams);
  Result<Accelerator*> accelerator = acceleratorOf(stream().device_type());
  // Without words, a staged call's copies may have to wait on the stream for the host's turn, behind
  // a kernel of a later call.
  if (accelerator.ok() && !streams_->words())
    accelerator = Error{ErrorCode::kUnsupported, "its streams have no words"};
  return {accelerator, accelerator.ok() ? OwnStream::nativeOf(stream()) : DeviceStream{}};
}

void KernelCalls::warn(const Error& why) const {
  log(LogLevel::kWarning, names_.log, "no kernels, though ", names_.variable,
      " asks for them: tensors of devices go through host memory: ", why.message);
}

void KernelCalls::checkDevice(const c10::Device& device) const {
  if (device == stream().device()) return;
  refuse(std::string(names_.owner) + "'s kernels use memory of " + stream().device().str() +
         ", and the tensor is on " + device.str() + ". " + names_.oneDevice);
}

const c10::Stream& KernelCalls::stream(bool isRecorded) {
  if (!isRecorded) return stream();
  if (!recordings_) recordings_.emplace(stream().device(), StreamRole::kRecords);
  return recordings_->stream();
}

c10::Stream KernelCalls::prompt() const {
  return OwnStream::named(stream().device(), own_->queues()->prompt());
}

void KernelCalls::drain(Deadline deadline) const {
  if (queue_) queue_->drain(deadline);
}

}  // namespace mooncake
