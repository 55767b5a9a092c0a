#include "backend/device/group_streams.h"

#include <map>
#include <optional>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "backend/arguments.h"
#include "backend/device/accelerator_of.h"
#include "backend/device/device_scope.h"
#include "backend/errors.h"
#include "base/log.h"
#include "device/row_copies.h"
#include "device/stream_queues.h"

namespace mooncake {
namespace {

// Returns a stream of the program; none: it is busy, in a capture, or cannot be known.
std::optional<DeviceStream> idleStream(const c10::Stream& programs) {
  const auto native = nativeStream(programs);
  if (!native.ok()) return std::nullopt;  // older torch does not tell the handle
  const DeviceScope on(programs.device());
  if (isCapturing(programs) || !programs.query()) return std::nullopt;
  return *native;
}

// The stream that the program works on now shares no queue with them, if it is idle. Without a queue
// in which the stream may wait, the group does without words.
OwnStream collectivesOn(const c10::Device& device, const StreamSettings& settings, bool& hasWords) {
  const auto accelerator = acceleratorOf(device.type());
  hasWords = settings.words && accelerator.ok() && (*accelerator)->hasStreamWords(device.index());
  if (hasWords) {
    StreamQueues& queues = *orThrow((*accelerator)->streamQueues(device.index()));
    const auto programs = idleStream(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    const auto taken = queues.take(StreamRole::kWaits, programs);
    if (taken.ok()) return OwnStream(device, *taken);
    if (taken.error().code != ErrorCode::kExhausted) throwError(taken.error());
    hasWords = false;
    log(LogLevel::kWarning, device.str(), "wait() will wait on the host: ", taken.error().message);
  }
  return OwnStream(device, StreamRole::kFollows);
}

// In the queue of the collectives: it waits for these only.
OwnStream callbacksBeside(const OwnStream& collectives) {
  const c10::Device device = collectives.stream().device();
  if (!collectives.queues()) return OwnStream(device);
  const auto beside = collectives.queues()->takeBeside(collectives.native());
  return beside.ok() ? OwnStream(device, *beside) : OwnStream(device, StreamRole::kFollows);
}

std::unique_ptr<StreamWords> wordsFor(const OwnStream& stream, bool hasWords) {
  return hasWords ? orThrow(StreamWords::make(*stream.accelerator(), stream.native())) : nullptr;
}

std::unique_ptr<WaitWords> waitWordsFor(const OwnStream& stream, bool hasWords) {
  return hasWords ? orThrow(WaitWords::make(*stream.accelerator())) : nullptr;
}

bool canCopyRows(const OwnStream& stream) {
  const c10::Device device = stream.stream().device();
  const Status ready = prepareRowCopies(*stream.accelerator(), device.index());
  if (ready.ok()) return true;
  log(LogLevel::kWarning, device.str(),
      "tensors are copied whole, with the rows that are not used: ", ready.error().message);
  return false;
}

// Lives until the process ends, as tensors of its memory may.
PinnedPool* poolOf(const OwnStream& stream, size_t limit) {
  static Mutex mutex;
  static auto* const pools PT_GUARDED_BY(mutex) =
      new std::map<std::pair<Accelerator*, int>, PinnedPool*>;
  Accelerator* const accelerator = stream.accelerator();
  if (!accelerator) return nullptr;
  const int device = stream.stream().device_index();
  Lock lock(mutex);
  PinnedPool*& pool = (*pools)[{accelerator, device}];
  if (!pool) pool = new PinnedPool(*accelerator, device, limit);
  return pool;
}

}  // namespace

GroupStreams::GroupStreams(const c10::Device& device, const StreamSettings& settings)
    : collectives_(collectivesOn(device, settings, hasWords_)),
      callbacks_(callbacksBeside(collectives_)),
      words_(wordsFor(collectives_, hasWords_)),
      copiesRows_(settings.rows && words_ && canCopyRows(collectives_)),
      waitWords_(waitWordsFor(collectives_, words_ != nullptr)),
      pinned_(poolOf(collectives_, settings.pinnedCache)) {}

GroupStreams::~GroupStreams() {
  for (const auto& [id, waits] : mayWait_)
    if (waits.isOwner) collectives_.queues()->release(waits.stream);
}

c10::Stream GroupStreams::prompt() const {
  return OwnStream::named(collectives().device(), collectives_.queues()->prompt());
}

const c10::Stream& GroupStreams::messages(const c10::Stream& callers) {
  Lock lock(mutex_);
  return messages_.try_emplace(callers.id(), callers.device(), StreamRole::kFollows)
      .first->second.stream();
}

bool GroupStreams::mayWait(const c10::Stream& callers) {
  if (!waitWords_) return false;
  Lock lock(mutex_);
  const auto known = mayWait_.find(callers.id());
  if (known != mayWait_.end()) return known->second.isOwner;
  const auto native = idleStream(callers);
  if (!native) return false;
  const auto isOwner = collectives_.queues()->reserve(*native);
  if (!isOwner.ok()) return false;
  mayWait_[callers.id()] = {*native, *isOwner};
  return *isOwner;
}

}  // namespace mooncake
