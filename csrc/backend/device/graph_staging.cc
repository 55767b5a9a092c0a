#include "backend/device/graph_staging.h"

#include <string>

#include <ATen/ops/from_blob.h>

#include "backend/arguments.h"
#include "backend/device/accelerator_of.h"
#include "backend/device/await_event.h"
#include "backend/device/device_scope.h"
#include "base/log.h"

namespace mooncake {
namespace {

// Nothing else runs on the stream of these copies.
constexpr auto kForCopies = std::chrono::seconds(10);

}  // namespace

at::Tensor GraphStaging::emptyOnHost(const at::Tensor& tensor) {
  const auto memory = orThrow(calls_.memory().take(tensor.nbytes(), taken_));
  return at::from_blob(memory.data(), tensor.sizes(),
                       at::TensorOptions(tensor.scalar_type()).device(at::kCPU));
}

void GraphStaging::mark() {
  const DeviceScope on(stream().device());
  const bool isNewGraph = !OwnStream::isCapturing(stream());
  c10::Event reached(stream().device_type());
  reached.record(callersStream());
  reached.block(stream());
  try {
    place_ = calls_.begin(isNewGraph);
    record();
  } catch (...) {
    join();  // else the capture cannot end
    throw;
  }
  forgetOwners();
}

void GraphStaging::join() const {
  c10::Event last(stream().device_type());
  last.record(stream());
  last.block(callersStream());
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

Status GraphStaging::fetchAgain(Group& group) {
  const DeviceScope on(stream().device());
  MOONCAKE_TRY(awaitOnHost(group, [&] { return place_.words->copied() >= pieces_; }));
  const c10::Stream copies = calls_.copies();
  copyInputs(copies);
  c10::Event copied(stream().device_type());
  copied.record(copies);
  return awaitOnHost(group, [&] { return copied.query(); });
}

void GraphStaging::restoreOutputs() const {
  std::string why = "the device does not copy them in time";
  try {
    const DeviceScope on(stream().device());
    const c10::Stream copies = calls_.copies();
    keepOutputs(copies);
    c10::Event kept(stream().device_type());
    kept.record(copies);
    if (awaitEvent(kept, Deadline::after(kForCopies))) return;
  } catch (const std::exception& error) {  // of torch: a lost context, for example
    why = error.what();
  }
  log(LogLevel::kWarning, stream().device().str(),
      "the outputs of a replayed operation that failed are undefined: ", why);
}

}  // namespace mooncake
