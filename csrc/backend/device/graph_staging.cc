#include "backend/device/graph_staging.h"

#include <string>
#include <thread>

#include <ATen/ops/from_blob.h>

#include "backend/arguments.h"
#include "backend/device/accelerator_of.h"
#include "backend/device/device_scope.h"
#include "backend/device/rescues.h"
#include "backend/device/stream_mark.h"
#include "base/log.h"

namespace mooncake {

at::Tensor GraphStaging::emptyOnHost(const at::Tensor& tensor) {
  const auto memory = orThrow(calls_.memory().take(tensor.nbytes(), taken_));
  return at::from_blob(memory.data(), tensor.sizes(),
                       at::TensorOptions(tensor.scalar_type()).device(at::kCPU));
}

void GraphStaging::mark() {
  const DeviceScope on(stream().device());
  const bool isNewGraph = !OwnStream::isCapturing(stream());
  placeBehind(stream(), callersStream());
  try {
    place_ = calls_.begin(isNewGraph);
    record();
  } catch (...) {
    placeBehind(callersStream(), stream());  // else the capture cannot end
    throw;
  }
  forgetOwners();
}

void GraphStaging::record() {
  if (comesInPieces()) throwIfError(place_.words->recordCopied(recorded(), 0));
  copyIn(stream());
  if (!comesInPieces()) throwIfError(place_.words->recordRing(recorded(), place_.number));
  throwIfError(place_.words->recordWait(recorded(), place_.number));
  copyOut();
  calls_.end();
}

// The operation begins with the first piece.
void GraphStaging::onPiece(const c10::Stream&) {
  throwIfError(place_.words->recordCopied(recorded(), ++pieces_));
  if (pieces_ == 1) throwIfError(place_.words->recordRing(recorded(), place_.number));
}

Status GraphStaging::awaitInput(Group& group, size_t bytes) const {
  if (!comesInPieces()) return {};
  const auto pieces = uint32_t(piecesOf(bytes, pieces_));
  return awaitOnHost(group, [&] { return place_.words->copied() >= pieces; });
}

template <typename Enqueue>
void GraphStaging::enqueueCopies(const Enqueue& enqueue) const {
  const c10::Stream stream = calls_.beginCopies();
  try {
    enqueue(stream);
  } catch (...) {
    calls_.markCopies(stream);
    throw;
  }
  calls_.markCopies(stream);
}

Status GraphStaging::fetchAgain(Group& group) {
  const DeviceScope on(stream().device());
  MOONCAKE_TRY(awaitOnHost(group, [&] { return place_.words->copied() >= pieces_; }));
  enqueueCopies([&](const c10::Stream& copies) { copyInputs(copies); });
  return awaitOnHost(group, [&] { return calls_.areCopied(); });
}

Status GraphStaging::fetchAfterLateCopies(Group& group) {
  if (!calls_.hasLateCopies()) return {};
  MOONCAKE_TRY(awaitOnHost(group, [&] { return calls_.areCopied(); }));
  return fetchAgain(group);
}

void GraphStaging::restoreOutputs() const {
  std::string why = "the device does not copy them in time";
  try {
    const DeviceScope on(stream().device());
    if (calls_.areCopied()) {  // else late copies may come on these
      enqueueCopies([&](const c10::Stream& copies) { keepOutputs(copies); });
      // Their stream moves when they are enqueued, but another stream may hold it up then.
      const Deadline deadline = Deadline::after(Rescues::kForCopies);
      while (!calls_.areCopied() && !deadline.passed())
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      if (!calls_.hasLateCopies()) return;
    }
  } catch (const std::exception& error) {  // of torch: a lost context, for example
    why = error.what();
  }
  log(LogLevel::kWarning, stream().device().str(),
      "the outputs of a replayed operation that failed are undefined: ", why);
}

}  // namespace mooncake
