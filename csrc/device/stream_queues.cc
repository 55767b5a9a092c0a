#include "device/stream_queues.h"

#include <algorithm>
#include <string>
#include <utility>

#include "device/device_env.h"

namespace mooncake {
namespace {

// After this many streams that bring no new queue, all queues are known.
constexpr size_t kRepeats = 4;
// After this many streams that do not move, the device is taken for one without more queues.
constexpr size_t kMostSilent = 8;
constexpr const char* kRemedy =
    "Set CUDA_DEVICE_MAX_CONNECTIONS=32 before the process first uses the device";

}  // namespace

Result<std::unique_ptr<StreamQueues>> StreamQueues::make(Accelerator& accelerator, int device) {
  const auto env = DeviceEnv::read();
  if (!env.ok()) return env.error();
  const bool hasWords = accelerator.hasStreamWords(device);
  std::unique_ptr<QueueProbe> probe;
  if (hasWords) {
    auto made = QueueProbe::make(accelerator);
    if (!made.ok()) return made.error();
    probe = std::move(*made);
  }
  std::unique_ptr<StreamQueues> made(
      new StreamQueues(accelerator, device, env->streamPriority, std::move(probe)));
  if (hasWords) MOONCAKE_TRY(made->findQueues());
  return made;
}

// A program that begins with long work holds up the queue of that. So some streams may tell nothing.
Status StreamQueues::findQueues() {
  std::lock_guard lock(mutex_);
  size_t repeats = 0, beyond = 0, silent = 0;
  while (repeats + beyond < kRepeats && silent < kMostSilent) {
    const auto grown = grow();
    if (!grown.ok()) return grown.error();
    repeats += *grown == Grown::kKnown;
    silent += *grown == Grown::kSilent;
    beyond += *grown == Grown::kBeyond;
  }
  count_ = queues_.size();
  isShared_ = repeats != 0 || beyond == 0;
  return {};
}

Status StreamQueues::checkPrompt() const {
  if (!isShared_ || count_ > kShared) return {};
  return {ErrorCode::kUnsupported,
          "all streams of device " + std::to_string(device_) + " share one hardware queue. " + kRemedy};
}

std::vector<DeviceStream> StreamQueues::firstOfAll() const {
  std::vector<DeviceStream> first;
  for (const Queue& queue : queues_) first.push_back(queue.first);
  return first;
}

Result<DeviceStream> StreamQueues::takeLoose() {
  if (loose_.empty()) return accelerator_.createStream(device_, priority_);
  const DeviceStream stream = loose_.back();
  loose_.pop_back();
  return stream;
}

Result<StreamQueues::Grown> StreamQueues::grow() {
  const auto made = accelerator_.createStream(device_, priority_);
  if (!made.ok()) return made.error();
  const auto queue = probe_->heldUpBy(*made, firstOfAll());
  if (queue.ok() && *queue) {
    queues_[**queue].unused.push_back(*made);
    return Grown::kKnown;
  }
  if (queue.ok() && queues_.size() < QueueProbe::kMost) {
    queues_.push_back({.first = *made});
    return Grown::kNew;
  }
  loose_.push_back(*made);
  if (queue.ok()) return Grown::kBeyond;
  if (queue.error().code != ErrorCode::kTimeout) return queue.error();
  return Grown::kSilent;
}

// New streams come into the queues in turn, about.
template <typename Fits>
Result<DeviceStream> StreamQueues::takeUnused(const Fits& fits) {
  for (size_t tries = 4 * queues_.size() + kRepeats;; --tries) {
    for (size_t i = 0; i < queues_.size(); ++i) {
      if (!fits(i) || queues_[i].unused.empty()) continue;
      const DeviceStream stream = queues_[i].unused.back();
      queues_[i].unused.pop_back();
      taken_[stream.handle] = i;
      return stream;
    }
    if (tries == 0) break;
    const auto grown = grow();
    if (!grown.ok()) return grown.error();
  }
  return {ErrorCode::kExhausted, "the driver of device " + std::to_string(device_) +
                                     " makes no stream in the queue that is needed"};
}

Result<DeviceStream> StreamQueues::takeAlone() {
  const auto isFree = [&](size_t i) { return i >= kFirstOwned && !queues_[i].owner; };
  bool isAnyFree = false;
  for (size_t i = 0; i < queues_.size(); ++i) isAnyFree |= isFree(i);
  if (!isAnyFree) {
    return {ErrorCode::kExhausted,
            "the streams of device " + std::to_string(device_) + " share " +
                std::to_string(queues_.size()) +
                " hardware queues, and none is left for one that waits. " + kRemedy};
  }
  auto stream = takeUnused(isFree);
  if (stream.ok()) queues_[taken_[stream->handle]].owner = stream->handle;
  return stream;
}

Result<DeviceStream> StreamQueues::take(StreamRole role) {
  std::lock_guard lock(mutex_);
  if (!isShared_ || role == StreamRole::kRecords) return takeLoose();
  if (role == StreamRole::kWaits) return takeAlone();
  if (!checkPrompt().ok()) return takeLoose();
  if (role == StreamRole::kPrompt) {
    auto own = takeUnused([](size_t i) { return i == kOfPrompt; });
    if (own.ok() || own.error().code != ErrorCode::kExhausted) return own;
    return queues_[kOfPrompt].first;
  }
  const auto alone = takeAlone();
  if (alone.ok() || alone.error().code != ErrorCode::kExhausted) return alone;
  auto shared = takeUnused([](size_t i) { return i == kShared; });
  if (shared.ok() || shared.error().code != ErrorCode::kExhausted) return shared;
  return takeLoose();
}

Result<DeviceStream> StreamQueues::takeBeside(DeviceStream taken) {
  std::lock_guard lock(mutex_);
  const auto known = taken_.find(taken.handle);
  if (known == taken_.end()) return takeLoose();
  return takeUnused([only = known->second](size_t i) { return i == only; });
}

void StreamQueues::giveBack(DeviceStream stream) {
  std::lock_guard lock(mutex_);
  const auto taken = taken_.find(stream.handle);
  if (taken == taken_.end()) {
    const bool isShared = !queues_.empty() && queues_[kOfPrompt].first.handle == stream.handle;
    if (!isShared) loose_.push_back(stream);
    return;
  }
  Queue& queue = queues_[taken->second];
  queue.unused.push_back(stream);
  if (queue.owner == stream.handle) queue.owner.reset();
  taken_.erase(taken);
}

Result<bool> StreamQueues::reserve(DeviceStream programs) {
  std::lock_guard lock(mutex_);
  if (!isShared_) return true;
  if (!checkPrompt().ok()) return false;
  const auto found = probe_->heldUpBy(programs, firstOfAll());
  if (!found.ok()) return found.error();
  if (!*found) return hasWaits();
  size_t queue = **found;
  // As long as no stream of ours is in them, the first queues are exchanged for later ones.
  const auto isUsed = [&](size_t i) {
    return queues_[i].owner || std::ranges::any_of(taken_, [i](auto& one) { return one.second == i; });
  };
  for (size_t later = count_ - 1; queue < kFirstOwned && later > queue && !isUsed(queue); --later) {
    if (isUsed(later)) continue;
    std::swap(queues_[queue], queues_[later]);
    queue = later;
    break;
  }
  if (queue < kFirstOwned) return false;
  std::optional<void*>& owner = queues_[queue].owner;
  if (!owner) owner = programs.handle;
  return owner == programs.handle;
}

Result<DeviceStream> StreamQueues::findMoving(Deadline deadline) {
  std::lock_guard lock(mutex_);
  const auto all = firstOfAll();
  const auto moving = probe_->findMoving(all, deadline);
  if (!moving.ok()) return moving.error();
  return all[*moving];
}

}  // namespace mooncake
