#include "backend/device/group_streams.h"

#include <map>
#include <mutex>
#include <utility>

#include "backend/arguments.h"
#include "base/log.h"
#include "device/row_copies.h"

namespace mooncake {
namespace {

std::unique_ptr<StreamWords> wordsFor(const OwnStream& stream) {
  Accelerator* const accelerator = stream.accelerator();
  if (!accelerator || !accelerator->hasStreamWords(stream.stream().device_index())) return nullptr;
  return orThrow(StreamWords::make(*accelerator, stream.native()));
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
  static std::mutex mutex;
  static auto* const pools = new std::map<std::pair<Accelerator*, int>, PinnedPool*>;
  Accelerator* const accelerator = stream.accelerator();
  if (!accelerator) return nullptr;
  const int device = stream.stream().device_index();
  std::lock_guard lock(mutex);
  PinnedPool*& pool = (*pools)[{accelerator, device}];
  if (!pool) pool = new PinnedPool(*accelerator, device, limit);
  return pool;
}

}  // namespace

GroupStreams::GroupStreams(const c10::Device& device, const StreamSettings& settings)
    : collectives_(device),
      callbacks_(device),
      words_(settings.words ? wordsFor(collectives_) : nullptr),
      copiesRows_(settings.rows && words_ && canCopyRows(collectives_)),
      waitWords_(waitWordsFor(collectives_, words_ != nullptr)),
      pinned_(poolOf(collectives_, settings.pinnedCache)) {}

const c10::Stream& GroupStreams::recordings() {
  std::lock_guard lock(mutex_);
  if (!recordings_) recordings_.emplace(collectives().device());
  return recordings_->stream();
}

const c10::Stream& GroupStreams::messages(const c10::Stream& callers) {
  std::lock_guard lock(mutex_);
  return messages_.try_emplace(callers.id(), callers.device()).first->second.stream();
}

}  // namespace mooncake
