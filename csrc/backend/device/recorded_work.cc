#include "backend/device/recorded_work.h"

#include <utility>

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace mooncake {

RecordedWork::RecordedWork(int rank, c10d::OpType type, const c10::Stream& stream,
                           std::vector<at::Tensor> outputs)
    : Work(rank, type), stream_(stream), outputs_(std::move(outputs)) {
  done_.emplace(stream.device_type());
  done_->record(stream);
}

RecordedWork::~RecordedWork() {
  c10::OptionalDeviceGuard on;
  try {
    on.reset_device(stream_.device());
  } catch (const std::exception&) {
    // The context is lost, so that no other one is made either.
  }
  done_.reset();
}

bool RecordedWork::wait(std::chrono::milliseconds) {
  const c10::Device device = stream_.device();
  done_->block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> RecordedWork::getFuture() {
  const auto type = c10::ListType::create(c10::TensorType::get());
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{stream_.device()});
  // The future records the position of the current stream.
  const c10::StreamGuard on(stream_);
  future->markCompleted(c10::IValue(outputs_));
  return future;
}

}  // namespace mooncake
