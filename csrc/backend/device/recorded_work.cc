#include "backend/device/recorded_work.h"

#include <utility>

#include <c10/core/StreamGuard.h>

namespace mooncake {

RecordedWork::RecordedWork(int rank, c10d::OpType type, const c10::Stream& stream,
                           std::vector<at::Tensor> outputs)
    : Work(rank, type), stream_(stream), outputs_(std::move(outputs)), done_(stream) {}

bool RecordedWork::wait(std::chrono::milliseconds) {
  done_.block();
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
