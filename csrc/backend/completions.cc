#include "backend/completions.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>
#include <pthread.h>
#include <utility>
#include <vector>

namespace mooncake {
namespace {

// A task that has waited for so long goes to another thread: what runs may be a callback that waits
// for this very task, as in fut.then(lambda f: dist.all_reduce(...,
// async_op=True).get_future().wait()). Sooner would only take tasks out of their order.
constexpr auto kStalled = std::chrono::milliseconds(2);
// So deep may such callbacks be nested. All of them may also be waiting for Python's lock.
constexpr size_t kMostThreads = 4;

}  // namespace

// Shared with the threads: one outlives its Completions when its own last task drops that.
struct Completions::State {
  struct Task {
    std::function<void()> run;
    Clock::time_point posted;
  };
  std::mutex mutex;  // guards everything below
  std::condition_variable changed;
  std::condition_variable idle;
  size_t busy = 0;  // threads that are in a task
  std::deque<Task> tasks;
  bool stopping = false;
  std::vector<std::thread> threads;  // each is started by a task that finds all others busy

  bool drain(Deadline deadline) {
    std::unique_lock lock(mutex);
    return idle.wait_until(lock, deadline.when(), [&] { return busy == 0 && tasks.empty(); });
  }
};

// Never destroyed: threads may end after main(). A forked child begins with an empty one: it has
// none of our threads, and a lock that one of them held at the fork would stay held there.
struct Completions::Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<State>> living;

  static Registry& instance() {
    alignas(Registry) static std::byte memory[sizeof(Registry)];
    static auto* const made = [] {
      ::pthread_atfork(nullptr, nullptr, [] { new (memory) Registry; });
      return new (memory) Registry;
    }();
    return *made;
  }
};

Completions::Completions() : state_(std::make_shared<State>()) {
  Registry& registry = Registry::instance();
  std::lock_guard lock(registry.mutex);
  std::erase_if(registry.living, [](const auto& state) { return state.expired(); });
  registry.living.push_back(state_);
}

Completions::~Completions() {
  std::vector<std::thread> threads;
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    threads.swap(state_->threads);
  }
  state_->changed.notify_all();
  for (auto& thread : threads) {
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();
    } else {
      thread.join();
    }
  }
}

void Completions::post(std::function<void()> task) {
  {
    std::lock_guard lock(state_->mutex);
    state_->tasks.push_back({std::move(task), Clock::now()});
    auto& threads = state_->threads;
    if (state_->busy == threads.size() && threads.size() < kMostThreads && !state_->stopping) {
      threads.emplace_back([state = state_] { run(state); });
      pthread_setname_np(threads.back().native_handle(), "mooncake-done");
    }
  }
  state_->changed.notify_one();
}

bool Completions::drain(Deadline deadline) { return state_->drain(deadline); }

void Completions::drainAll(Deadline deadline) {
  std::vector<std::weak_ptr<State>> living;
  {
    Registry& registry = Registry::instance();
    std::lock_guard lock(registry.mutex);
    living = registry.living;
  }
  for (const auto& one : living) {
    if (const auto state = one.lock()) (void)state->drain(deadline);
  }
}

void Completions::run(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  for (;;) {
    if (state->tasks.empty()) {
      if (state->stopping) return;
      state->changed.wait(lock);
      continue;
    }
    const auto due = state->tasks.front().posted + kStalled;
    if (state->busy != 0 && Clock::now() < due) {
      state->changed.wait_until(lock, due);
      continue;
    }
    auto task = std::move(state->tasks.front().run);
    state->tasks.pop_front();
    ++state->busy;
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
    --state->busy;
    if (state->busy == 0) state->idle.notify_all();
  }
}

}  // namespace mooncake
