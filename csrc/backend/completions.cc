#include "backend/completions.h"

#include <condition_variable>
#include <mutex>
#include <pthread.h>
#include <utility>
#include <vector>

namespace mooncake {

// Shared with the thread, which outlives its Completions when its own last task drops that.
struct Completions::State {
  std::mutex mutex;  // guards everything below
  std::condition_variable posted;
  std::condition_variable idle;
  bool running = false;
  std::vector<std::function<void()>> tasks;
  bool stopping = false;
  std::thread thread;  // started by the first task
};

Completions::Completions() : state_(std::make_shared<State>()) {}

Completions::~Completions() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->posted.notify_one();
  if (!state_->thread.joinable()) return;
  if (state_->thread.get_id() == std::this_thread::get_id()) {
    state_->thread.detach();
  } else {
    state_->thread.join();
  }
}

void Completions::post(std::function<void()> task) {
  {
    std::lock_guard lock(state_->mutex);
    state_->tasks.push_back(std::move(task));
    if (!state_->thread.joinable()) {
      state_->thread = std::thread([state = state_] { run(state); });
      pthread_setname_np(state_->thread.native_handle(), "mooncake-done");
    }
  }
  state_->posted.notify_one();
}

bool Completions::drain(Deadline deadline) {
  std::unique_lock lock(state_->mutex);
  return state_->idle.wait_until(lock, deadline.when(),
                                 [&] { return !state_->running && state_->tasks.empty(); });
}

void Completions::run(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  for (;;) {
    state->posted.wait(lock, [&] { return state->stopping || !state->tasks.empty(); });
    if (state->tasks.empty()) return;
    auto tasks = std::exchange(state->tasks, {});
    state->running = true;
    lock.unlock();
    for (auto& task : tasks) {
      task();
      task = nullptr;
    }
    lock.lock();
    state->running = false;
    state->idle.notify_all();
  }
}

}  // namespace mooncake
