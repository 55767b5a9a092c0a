#include "device/stream_queues.h"

#include <algorithm>
#include <span>
#include <string>
#include <thread>

#include "base/log.h"
#include "device/device_env.h"

namespace mooncake {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// After this many streams in a row that bring no new queue, all queues are known.
constexpr size_t kRepeats = 4;
// After this many streams that do not move, the device is taken for one without more queues.
constexpr size_t kMostSilent = 8;
// For a stream of a certain queue. New streams come into the queues in turn, about.
constexpr milliseconds kForStream{500};
// For the stream of an owner that has just gone. It is idle, unless the program still waits for it.
constexpr milliseconds kForLeaving{20};
// How long prompt work looks for a stream that moves. Other callers may look in between.
constexpr microseconds kForPrompt{1000}, kForLook{200};
constexpr const char* kRemedy =
    "Set CUDA_DEVICE_MAX_CONNECTIONS=32 before the process first uses the device";

}  // namespace

Result<std::unique_ptr<StreamQueues>> StreamQueues::make(Accelerator& accelerator, int device) {
  const auto env = DeviceEnv::read();
  if (!env.ok()) return env.error();
  std::unique_ptr<StreamQueues> made(new StreamQueues(accelerator, device, env->streamPriority));
  Lock lock(made->mutex_);
  if (accelerator.hasStreamWords(device)) {
    {
      Lock moving(made->movingMutex_);
      for (auto* const probe : {&made->probe_, &made->mover_}) {
        auto one = QueueProbe::make(accelerator);
        if (!one.ok()) return one.error();
        *probe = std::move(*one);
      }
    }
    const Status found = made->findQueues();
    if (!found.ok() && found.error().code != ErrorCode::kUnsupported) return found.error();
    if (!found.ok()) {
      log(LogLevel::kWarning, accelerator.name(), "no stream of device ", device,
          " waits for words: ", found.error().message);
      made->probe_.reset();
      made->queues_.clear();
      Lock moving(made->movingMutex_);
      made->mover_.reset();
    }
  }
  if (made->queues_.empty()) {
    const auto first = made->takeLoose();
    if (!first.ok()) return first.error();
    Lock moving(made->movingMutex_);
    made->moving_ = {*first};
    made->unowned_ = 1;
  }
  return made;
}

size_t StreamQueues::count() const {
  Lock lock(mutex_);
  return queues_.size();
}

// A program that begins with long work holds up the queue of that. So some streams may tell nothing.
Status StreamQueues::findQueues() {
  size_t repeats = 0, beyond = 0, silent = 0;
  while (repeats + beyond < kRepeats && silent < kMostSilent) {
    const auto grown = grow();
    if (!grown.ok()) return grown.error();
    if (*grown == Grown::kNew) repeats = 0;
    repeats += *grown == Grown::kKnown;
    silent += *grown == Grown::kSilent;
    beyond += *grown == Grown::kBeyond;
  }
  isShared_ = repeats != 0 || beyond == 0;
  showMoving();
  return {};
}

Status StreamQueues::checkPrompt() const {
  Lock lock(mutex_);
  return checkQueues();
}

Status StreamQueues::checkQueues() const {
  if (!probe_ || !isShared_ || queues_.size() > kShared) return {};
  return {ErrorCode::kUnsupported, "all streams of device " + std::to_string(device_) +
                                       " share one hardware queue. " + kRemedy};
}

std::vector<DeviceStream> StreamQueues::firstOfAll() const {
  std::vector<DeviceStream> first;
  for (const Queue& queue : queues_) first.push_back(queue.first);
  return first;
}

void StreamQueues::showMoving() {
  if (queues_.empty()) return;
  Lock lock(movingMutex_);
  moving_.clear();
  for (const bool areOwned : {false, true}) {
    for (size_t i = 0; i < queues_.size(); ++i) {
      const bool isOwned = queues_[i].owner || i == kShared;
      if (isOwned == areOwned) moving_.push_back(queues_[i].first);
    }
    if (!areOwned) unowned_ = moving_.size();
  }
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
    queues_.push_back({.first = *made, .unused = {}, .owner = {}});
    return Grown::kNew;
  }
  loose_.push_back(*made);
  if (queue.ok()) return Grown::kBeyond;
  if (queue.error().code != ErrorCode::kTimeout) return queue.error();
  return Grown::kSilent;
}

template <typename Fits>
Result<DeviceStream> StreamQueues::takeUnused(const Fits& fits) {
  const Deadline deadline = Deadline::after(kForStream);
  for (size_t tries = 4 * queues_.size() + kRepeats;; --tries) {
    for (size_t i = 0; i < queues_.size(); ++i) {
      if (!fits(i) || queues_[i].unused.empty()) continue;
      const DeviceStream stream = queues_[i].unused.back();
      queues_[i].unused.pop_back();
      taken_[stream.handle] = i;
      return stream;
    }
    if (tries == 0 || deadline.passed()) break;
    const auto grown = grow();
    if (!grown.ok()) return grown.error();
    if (*grown == Grown::kNew) showMoving();
  }
  return {ErrorCode::kExhausted, "the driver of device " + std::to_string(device_) +
                                     " makes no stream in the queue that is needed"};
}

bool StreamQueues::isUsed(size_t queue) const {
  return queues_[queue].owner ||
         std::ranges::any_of(taken_, [queue](auto& one) { return one.second == queue; });
}

// Its place is the second one, as long as no stream of ours is there: then it holds up no prompt work.
std::optional<size_t> StreamQueues::leaveToProgram(DeviceStream programs) {
  const auto found = probe_->heldUpBy(programs, firstOfAll());
  if (!found.ok() || !*found) return std::nullopt;
  const size_t queue = **found;
  if (queue == kShared || queues_.size() <= kShared || isUsed(queue) || isUsed(kShared))
    return queue;
  std::swap(queues_[queue], queues_[kShared]);
  showMoving();
  return kShared;
}

Result<DeviceStream> StreamQueues::takeAlone(std::optional<size_t> apartFrom) {
  const auto isFree = [&](size_t i) REQUIRES(mutex_) {
    return i >= kFirstOwned && !queues_[i].owner && i != apartFrom;
  };
  const auto isAnyFree = [&]() REQUIRES(mutex_) {
    endLeaving();
    for (size_t i = 0; i < queues_.size(); ++i) {
      if (isFree(i)) return true;
    }
    return false;
  };
  const Deadline deadline = Deadline::after(kForLeaving);
  while (!isAnyFree() && !leaving_.empty() && !deadline.passed())
    std::this_thread::sleep_for(microseconds(100));
  if (!isAnyFree()) {
    return {ErrorCode::kExhausted, "the streams of device " + std::to_string(device_) + " share " +
                                       std::to_string(queues_.size()) +
                                       " hardware queues, and none is left for one that waits. " +
                                       kRemedy};
  }
  auto stream = takeUnused(isFree);
  if (stream.ok()) queues_[taken_[stream->handle]].owner = stream->handle;
  if (stream.ok()) showMoving();
  return stream;
}

Result<DeviceStream> StreamQueues::take(StreamRole role, std::optional<DeviceStream> programs) {
  Lock lock(mutex_);
  endLeaving();
  if (!probe_ && role == StreamRole::kWaits)
    return {ErrorCode::kExhausted,
            "streams of device " + std::to_string(device_) + " know no words"};
  if (!probe_ || !isShared_ || role == StreamRole::kRecords) return takeLoose();
  if (queues_.empty()) MOONCAKE_TRY(findQueues());  // all were held up before
  const auto apartFrom = programs ? leaveToProgram(*programs) : std::nullopt;
  if (role == StreamRole::kWaits) return takeAlone(apartFrom);
  if (!checkQueues().ok()) return takeLoose();
  if (role == StreamRole::kStops) return takeUnused([](size_t i) { return i == kOfPrompt; });
  const auto alone = takeAlone(apartFrom);
  if (alone.ok() || alone.error().code != ErrorCode::kExhausted) return alone;
  auto shared = takeUnused([](size_t i) { return i == kShared; });
  if (shared.ok() || shared.error().code != ErrorCode::kExhausted) return shared;
  return takeLoose();
}

Result<DeviceStream> StreamQueues::takeBeside(DeviceStream taken) {
  Lock lock(mutex_);
  endLeaving();
  const auto known = taken_.find(taken.handle);
  if (known == taken_.end()) return takeLoose();
  return takeUnused([only = known->second](size_t i) { return i == only; });
}

// If the end of its work cannot be known, the stream keeps its queue.
void StreamQueues::giveBack(DeviceStream stream) {
  const auto isCapturing = accelerator_.isCapturing(stream);
  if (!isCapturing.ok() || *isCapturing) return;
  auto idle = accelerator_.createEvent(device_);
  if (!idle.ok() || !(*idle)->record(stream).ok()) return;
  Lock lock(mutex_);
  leaving_.push_back({stream, std::move(*idle)});
  endLeaving();
}

void StreamQueues::endLeaving() {
  std::erase_if(leaving_, [this](const Leaving& one) REQUIRES(mutex_) {
    const auto isIdle = one.idle->hasHappened();
    if (isIdle.ok() && *isIdle) backInQueue(one.stream);
    return !isIdle.ok() || *isIdle;
  });
}

void StreamQueues::backInQueue(DeviceStream stream) {
  const auto taken = taken_.find(stream.handle);
  if (taken == taken_.end()) return loose_.push_back(stream);
  Queue& queue = queues_[taken->second];
  queue.unused.push_back(stream);
  if (queue.owner == stream.handle) queue.owner.reset();
  taken_.erase(taken);
  showMoving();
}

Result<bool> StreamQueues::reserve(DeviceStream programs) {
  Lock lock(mutex_);
  endLeaving();
  if (!probe_ || !isShared_) return probe_ != nullptr;
  if (queues_.size() <= kFirstOwned) return false;
  const auto found = probe_->heldUpBy(programs, firstOfAll());
  if (!found.ok()) return found.error();
  if (!*found) return false;
  size_t place = **found;
  // As long as no stream of ours is in them, the first queues are exchanged for later ones.
  for (size_t later = queues_.size() - 1; place < kFirstOwned && later > place; --later) {
    if (isUsed(place) || isUsed(later)) continue;
    std::swap(queues_[place], queues_[later]);
    place = later;
  }
  if (place < kFirstOwned) return false;
  Queue& queue = queues_[place];
  if (!queue.owner) queue.owner = programs.handle;
  if (queue.owner != programs.handle || taken_.contains(programs.handle)) return false;
  ++queue.reserves;
  showMoving();
  return true;
}

void StreamQueues::release(DeviceStream programs) {
  Lock lock(mutex_);
  const auto queue = std::ranges::find(queues_, std::optional(programs.handle), &Queue::owner);
  if (queue == queues_.end() || queue->reserves == 0 || --queue->reserves != 0) return;
  queue->owner.reset();
  showMoving();
}

// Not in a queue where a stream of ours may begin to wait before the work does.
DeviceStream StreamQueues::prompt() {
  Lock lock(movingMutex_);
  const auto fit = std::span(moving_).first(unowned_);
  if (fit.size() > 1) {
    const auto moving = mover_->findMoving(fit, Deadline::after(kForPrompt));
    if (moving.ok()) return fit[*moving];
  }
  return fit.front();
}

Result<DeviceStream> StreamQueues::findMoving(Deadline deadline) {
  for (;;) {
    Lock lock(movingMutex_);
    if (!mover_) return moving_.front();
    const auto moving = mover_->findMoving(
        moving_, Deadline::after(std::min<Clock::duration>(deadline.left(), kForLook)));
    if (moving.ok()) return moving_[*moving];
    if (deadline.passed() || moving.error().code != ErrorCode::kTimeout) return moving.error();
  }
}

}  // namespace mooncake
