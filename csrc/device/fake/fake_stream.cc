#include "device/fake/fake_stream.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/thread.h"

namespace mooncake {

FakeStream::FakeStream(DeviceStream id, std::shared_ptr<FakeQueue> queue)
    : id_(id),
      name_("stream " + std::to_string(reinterpret_cast<uintptr_t>(id.handle)) +
            " of fake device " + std::to_string(id.device)),
      queue_(std::move(queue)) {}

FakeStream::~FakeStream() {
  halt();
  if (thread_.joinable()) thread_.join();
}

Status FakeStream::enqueue(Task&& task) {
  Lock lock(mutex_);
  if (isHalted_) return {ErrorCode::kSystem, name_ + " runs no more work"};
  if (!thread_.joinable()) {
    const std::string number = std::to_string(reinterpret_cast<uintptr_t>(id_.handle));
    auto started =
        startThread("fake-" + std::to_string(id_.device) + "." + number, [this] { run(); });
    if (!started.ok()) return started.error();
    thread_ = std::move(*started);
  }
  tasks_.push_back({std::move(task), queue_ ? queue_->enter() : 0});
  ++enqueued_;
  changed_.notify_all();
  return {};
}

void FakeStream::retain(std::shared_ptr<void> object) {
  Lock lock(mutex_);
  if (isOver_ || done_ == enqueued_) return;
  tasks_.push_back({[object = std::move(object)](FakeStream&) {}});
  ++enqueued_;
}

Status FakeStream::synchronize() {
  Lock lock(mutex_);
  if (std::this_thread::get_id() == thread_.get_id())
    return {ErrorCode::kInvalidArgument, "a task of " + name_ + " cannot wait for its own stream"};
  const uint64_t last = enqueued_;
  changed_.wait(mutex_, [&]() REQUIRES(mutex_) { return done_ >= last || isHalted_; });
  if (done_ < last) return {ErrorCode::kSystem, name_ + " runs no more work"};
  return {};
}

bool FakeStream::isIdle() {
  Lock lock(mutex_);
  return isOver_ || done_ == enqueued_;
}

void FakeStream::close() {
  Lock lock(mutex_);
  isClosed_ = true;
  changed_.notify_all();
}

void FakeStream::stop() {
  Lock lock(mutex_);
  isHalted_ = true;
  changed_.notify_all();
}

void FakeStream::halt() {
  stop();
  if (queue_) queue_->wake();
}

bool FakeStream::hasEnded() {
  Lock lock(mutex_);
  return isOver_ || !thread_.joinable();
}

void FakeStream::join(Deadline deadline) {
  Lock lock(mutex_);
  if (!thread_.joinable() || thread_.get_id() == std::this_thread::get_id()) return;
  // A thread that is over takes the lock no more.
  if (changed_.wait_until(mutex_, deadline.when(), [&]() REQUIRES(mutex_) { return isOver_; }))
    thread_.join();
}

bool FakeStream::awaitWord(const StreamWord* word, uint32_t value) {
  constexpr Clock::duration kShortest = std::chrono::microseconds(10);
  constexpr Clock::duration kLongest = std::chrono::milliseconds(1);
  const auto began = Clock::now();
  Lock lock(mutex_);
  while (!isHalted_) {
    if (static_cast<int32_t>(word->load(std::memory_order_acquire) - value) >= 0) return true;
    // An eighth of the wait so far: short waits end soon, and long ones cost little.
    const auto pause = std::clamp((Clock::now() - began) / 8, kShortest, kLongest);
    changed_.wait_for(mutex_, pause, [&]() REQUIRES(mutex_) { return isHalted_.load(); });
  }
  return false;
}

void FakeStream::pass(const Place& place) {
  if (queue_ && place.ticket != 0) queue_->pass(place.ticket);
}

void FakeStream::runInTurn(Place& place) {
  if (queue_ && place.ticket != 0) {
    if (!queue_->awaitHead(place.ticket, isHalted_)) return pass(place);
  }
  if (!place.task.isWait) pass(place);
  place.task.run(*this);
  pass(place);
}

void FakeStream::run() {
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(mutex_,
                  [&]() REQUIRES(mutex_) { return !tasks_.empty() || isClosed_ || isHalted_; });
    if (tasks_.empty() || isHalted_) break;
    Place place = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    runInTurn(place);
    place.task = {};  // its objects go before the task counts as done
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
  while (!tasks_.empty()) {
    std::deque<Place> dropped = std::exchange(tasks_, {});
    lock.unlock();
    for (const Place& place : dropped) pass(place);
    dropped.clear();  // destructors of a task's objects may take any lock
    lock.lock();
  }
  isOver_ = true;
  changed_.notify_all();
}

}  // namespace mooncake
