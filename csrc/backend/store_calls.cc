#include "backend/store_calls.h"

#include <algorithm>

#include "base/mutex.h"
#include "base/thread.h"

namespace mooncake {
namespace {

// Longest time for an answer once `until` has passed, for the details of an error. A store that has
// been silent for so long gets no more.
constexpr auto kAnswers = std::chrono::seconds(1);

}  // namespace

// Shared with the thread, which may outlive the StoreCalls.
struct StoreCalls::State {
  Mutex mutex;
  Condition changed;
  std::function<void()> task GUARDED_BY(mutex);  // that the thread has not taken yet
  bool isBusy GUARDED_BY(mutex) = false;  // from the moment that a task is given until it has run
  Clock::time_point began GUARDED_BY(mutex);  // of the task, while isBusy
  bool isOver GUARDED_BY(mutex) = false;

  void serve() {
    Lock lock(mutex);
    for (;;) {
      changed.wait(mutex, [this]() REQUIRES(mutex) { return task || isOver; });
      if (!task) return;
      auto current = std::exchange(task, nullptr);
      lock.unlock();
      current();
      current = nullptr;  // lets go of the store before the caller goes on
      lock.lock();
      isBusy = false;
      changed.notify_all();
    }
  }
};

StoreCalls::~StoreCalls() {
  if (!state_) return;
  Lock lock(state_->mutex);
  state_->isOver = true;
  state_->changed.notify_all();
  const bool isBusy = state_->isBusy;
  lock.unlock();
  if (isBusy) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

Status StoreCalls::start() {
  auto state = std::make_shared<State>();
  auto thread = startThread("mooncake-store", [state] { state->serve(); });
  if (!thread.ok()) return thread.error();
  thread_ = std::move(*thread);
  state_ = std::move(state);
  return {};
}

Status StoreCalls::runTask(std::function<void()> task) {
  if (!state_) MOONCAKE_TRY(start());
  State& state = *state_;
  Lock lock(state.mutex);
  const auto since = state.isBusy ? state.began : Clock::now();
  const auto end = std::max(until_.when(), since + kAnswers);
  const auto isFree = [&state]() REQUIRES(state.mutex) { return !state.isBusy; };
  if (state.changed.wait_until(state.mutex, end, isFree)) {
    state.task = std::move(task);
    state.isBusy = true;
    state.began = Clock::now();
    state.changed.notify_all();
    if (state.changed.wait_until(state.mutex, end, isFree)) return {};
  }
  return {ErrorCode::kTimeout, "the store did not answer in time"};
}

Clock::duration StoreCalls::silence() const {
  if (!state_) return {};
  Lock lock(state_->mutex);
  return state_->isBusy ? Clock::now() - state_->began : Clock::duration::zero();
}

}  // namespace mooncake
