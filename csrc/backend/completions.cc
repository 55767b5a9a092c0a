#include "backend/completions.h"

#include <deque>
#include <utility>

#include "backend/drains.h"
#include "backend/loss.h"
#include "base/fork.h"
#include "base/mutex.h"
#include "base/thread.h"

namespace mooncake {

// Shared with the threads: one outlives its Completions when its own last task drops that.
struct Completions::State final : Drain, std::enable_shared_from_this<State> {
  // The object to which the calling thread belongs; null: none.
  static thread_local State* home;
  // This thread runs a task, and comes for the next one.
  static thread_local bool isRunner;

  mutable Mutex mutex;
  Condition changed;
  std::deque<std::function<void()>> tasks GUARDED_BY(mutex);
  size_t unfinished GUARDED_BY(mutex) = 0;   // posted tasks that have not ended
  bool hasRunner GUARDED_BY(mutex) = false;  // a thread comes for the next task
  bool isStopping GUARDED_BY(mutex) = false;
  const uint32_t generation = forkGeneration();

  Status start() REQUIRES(mutex);
  void runNext() REQUIRES(mutex);  // gives it back while the task runs
  void runThread() REQUIRES(mutex);

  bool isIdle() const override EXCLUDES(mutex) {
    Lock lock(mutex);
    return unfinished == 0;
  }
  bool isCallerInside() const override { return home == this; }
  bool drain(Deadline deadline) override EXCLUDES(mutex);
};

thread_local Completions::State* Completions::State::home = nullptr;
thread_local bool Completions::State::isRunner = false;

Status Completions::State::start() {
  if (hasRunner) return {};
  auto thread = startThread("mooncake-done", [state = shared_from_this()] {
    const CallbackScope scope({});
    home = state.get();
    isRunner = true;
    Lock lock(state->mutex);
    state->runThread();
  });
  if (!thread.ok()) return thread.error();
  thread->detach();
  hasRunner = true;
  return {};
}

void Completions::State::runNext() {
  auto task = std::move(tasks.front());
  tasks.pop_front();
  {
    const UnlockedScope unlocked(mutex);
    task();
    task = nullptr;
  }
  --unfinished;
  changed.notify_all();
}

void Completions::State::runThread() {
  while (isRunner && !(isStopping && tasks.empty())) {
    if (tasks.empty()) {
      changed.wait(mutex);
    } else {
      runNext();
    }
  }
  if (isRunner) hasRunner = false;
  changed.notify_all();
}

bool Completions::State::drain(Deadline deadline) {
  if (isCallerInside()) return true;
  Lock lock(mutex);
  if (unfinished == 0) return true;
  if (!start().ok()) {  // nobody else runs them
    while (!hasRunner && !tasks.empty()) runNext();
  }
  return changed.wait_until(mutex, deadline.when(),
                            [&]() REQUIRES(mutex) { return unfinished == 0; });
}

Completions::Completions() : state_(std::make_shared<State>()) { addDrain(state_); }

Completions::~Completions() {
  if (state_->generation != forkGeneration()) {
    // A forked child has no thread that could end, and may have inherited a lock that is held.
    new std::shared_ptr<State>(state_);
    return;
  }
  Lock lock(state_->mutex);
  while (!state_->hasRunner && !state_->tasks.empty()) state_->runNext();
  state_->isStopping = true;
  state_->changed.notify_all();
  if (State::home == state_.get()) return;
  state_->changed.wait(state_->mutex, [&]() REQUIRES(state_->mutex) { return !state_->hasRunner; });
}

Status Completions::start() {
  Lock lock(state_->mutex);
  return state_->start();
}

void Completions::post(std::function<void()> task) {
  Lock lock(state_->mutex);
  state_->tasks.push_back(std::move(task));
  ++state_->unfinished;
  if (!state_->isStopping) (void)state_->start();
  state_->changed.notify_all();
}

bool Completions::isIdle() const { return state_->isIdle(); }

bool Completions::drain(Deadline deadline) {
  if (state_->isCallerInside() || callbacks_->isCallerInside()) return true;
  // Each may give work to the other.
  while (!state_->isIdle() || !callbacks_->isIdle()) {
    if (!state_->drain(deadline) || !callbacks_->drain(deadline)) return false;
  }
  return true;
}

void Completions::giveWorkAway() {
  if (!State::isRunner) return;
  State* const state = State::home;
  Lock lock(state->mutex);
  state->hasRunner = false;
  State::isRunner = !state->start().ok();
  state->hasRunner = true;
}

}  // namespace mooncake
