#include "backend/device/rescues.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "backend/arguments.h"
#include "backend/device/accelerator_of.h"
#include "backend/device/device_scope.h"
#include "backend/device/own_stream.h"
#include "base/log.h"
#include "base/thread.h"
#include "device/stream_queues.h"

namespace mooncake {
namespace {

// How long one look at the device's queues may take.
constexpr std::chrono::milliseconds kForLook{1};
constexpr std::chrono::microseconds kShortestPause{20}, kLongestPause{1000};

}  // namespace

// Never destroyed: the thread may run until the process ends.
Rescues& Rescues::ofProcess() {
  static auto* const rescues = new Rescues;
  return *rescues;
}

void Rescues::begin(Rescue rescue) { ofProcess().add(std::move(rescue)); }

void Rescues::add(Rescue&& rescue) {
  Lock lock(mutex_);
  if (!thread_.joinable()) {
    auto started = startThread("mooncake-rescue", [this] { run(); });
    if (!started.ok()) {
      lock.unlock();
      Pending pending{std::move(rescue)};
      return giveUp(pending, started.error().message);
    }
    thread_ = std::move(*started);
  }
  added_.push_back({std::move(rescue)});
  changed_.notify_all();
}

void Rescues::run() {
  std::list<Pending> pending;
  std::chrono::microseconds pause = kShortestPause;
  for (;;) {
    {
      Lock lock(mutex_);
      if (pending.empty()) {
        changed_.wait(mutex_, [this]() REQUIRES(mutex_) { return !added_.empty(); });
        pause = kShortestPause;
      } else if (changed_.wait_for(mutex_, pause,
                                   [this]() REQUIRES(mutex_) { return !added_.empty(); })) {
        pause = kShortestPause;
      }
      pending.splice(pending.end(), added_);
    }
    std::erase_if(pending, advance);
    pause = std::min(2 * pause, kLongestPause);
  }
}

bool Rescues::advance(Pending& pending) {
  try {
    const DeviceScope on(pending.rescue.device);
    return isOver(pending);
  } catch (const std::exception& error) {  // of torch, or the driver's: a lost context, for example
    giveUp(pending, error.what());
  }
  // Nothing tells when the device has copied, so the memory is never freed.
  if (pending.isEnqueued) new Rescue(std::move(pending.rescue));
  return true;
}

bool Rescues::isOver(Pending& pending) {
  if (!pending.copiedBy) {
    if (!pending.rescue.isReached()) return false;
    pending.copiedBy = Deadline::after(kForCopies);
  }
  if (!pending.isEnqueued && !pending.isReleased) copy(pending);
  const bool isCopied = pending.copied && pending.copied->query();
  if (isCopied) {
    release(pending);
  } else if (pending.copiedBy->passed()) {
    giveUp(pending,
           "the device has not copied them in " + std::to_string(kForCopies.count()) + " s");
  }
  return isCopied || (pending.isReleased && !pending.isEnqueued);
}

// Enqueues the copies on a stream that no other one holds up, if there is one now.
void Rescues::copy(Pending& pending) {
  const c10::Device device = pending.rescue.device;
  StreamQueues& queues =
      *orThrow(orThrow(acceleratorOf(device.type()))->streamQueues(device.index()));
  const auto moving = queues.findMoving(Deadline::after(kForLook));
  if (!moving.ok() && moving.error().code == ErrorCode::kTimeout) return;
  const c10::Stream stream = OwnStream::named(device, orThrow(moving));
  pending.isEnqueued = true;
  try {
    pending.rescue.copy(stream);
  } catch (const std::exception& error) {  // of torch, between two copies for example
    giveUp(pending, error.what());
  }
  pending.copied.emplace(device.type()).record(stream);
}

void Rescues::release(Pending& pending) {
  if (!std::exchange(pending.isReleased, true)) pending.rescue.release();
}

void Rescues::giveUp(Pending& pending, const std::string& why) {
  if (pending.isReleased) return;
  log(LogLevel::kWarning, pending.rescue.device.str(), pending.rescue.what,
      " are undefined: ", why);
  release(pending);
}

}  // namespace mooncake
