#include "backend/callbacks.h"

#include <algorithm>
#include <deque>
#include <exception>
#include <list>
#include <utility>

#include "backend/completions.h"
#include "backend/drains.h"
#include "base/fork.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/thread.h"

namespace mooncake {

// Shared with its threads, which may outlive the Callbacks.
struct Callbacks::State final : Drain, std::enable_shared_from_this<State> {
  // A callback that has given its turn away, until it takes it again.
  struct Paused {
    const std::atomic<Moment>* until;  // the moment from which it may go on
  };

  // The object of the callback that the calling thread runs; null: none.
  static thread_local State* current;
  // The callback of this thread has given its turn away.
  static thread_local bool isPaused;

  mutable Mutex mutex;
  Condition changed;
  std::deque<std::function<void()>> queue GUARDED_BY(mutex);
  Moment posted GUARDED_BY(mutex) = 0;
  Moment begun GUARDED_BY(mutex) = 0;
  bool isTaken GUARDED_BY(mutex) = false;  // a callback has the turn
  std::list<Paused*> paused GUARDED_BY(mutex);
  size_t threads GUARDED_BY(mutex) = 0;
  size_t idle GUARDED_BY(mutex) = 0;  // threads that wait for a callback to run
  bool isStopping GUARDED_BY(mutex) = false;
  const uint32_t generation = forkGeneration();
  std::atomic<size_t> unfinished{0};  // posted callbacks that have not ended

  Paused* due() const REQUIRES(mutex);
  bool mayBegin() const REQUIRES(mutex) { return !isTaken && !queue.empty() && !due(); }
  bool offerTurn() REQUIRES(mutex);
  void runNext() REQUIRES(mutex);  // gives it back while the callback runs
  void runThread() REQUIRES(mutex);
  void giveTurn(Paused& entry) REQUIRES(mutex);
  bool retakeTurn(Paused& entry, Deadline deadline) REQUIRES(mutex);

  bool isIdle() const override { return unfinished.load() == 0; }
  bool isCallerInside() const override { return current == this; }
  bool drain(Deadline deadline) override EXCLUDES(mutex);
};

thread_local Callbacks::State* Callbacks::State::current = nullptr;
thread_local bool Callbacks::State::isPaused = false;

// The paused callback that goes on next, if its moment has come.
Callbacks::State::Paused* Callbacks::State::due() const {
  Paused* first = nullptr;
  for (Paused* entry : paused) {
    const Moment when = entry->until->load(std::memory_order_acquire);
    if (when <= begun && (!first || when < first->until->load(std::memory_order_acquire)))
      first = entry;
  }
  return first;
}

// Returns false if there is a callback to run, and no thread that will come for it.
bool Callbacks::State::offerTurn() {
  changed.notify_all();
  if (!mayBegin() || idle > 0) return true;
  auto thread = startThread("mooncake-then", [state = shared_from_this()] {
    Lock lock(state->mutex);
    state->runThread();
  });
  if (!thread.ok()) {
    log(LogLevel::kWarning, "callbacks of futures",
        "wait for each other: ", thread.error().message);
    return false;
  }
  thread->detach();
  ++threads;
  return true;
}

void Callbacks::State::runNext() {
  auto callback = std::move(queue.front());
  queue.pop_front();
  ++begun;
  isTaken = true;
  State* const outer = std::exchange(current, this);
  {
    const UnlockedScope unlocked(mutex);
    try {
      callback();
    } catch (const std::exception& error) {
      log(LogLevel::kError, "a callback of a future", "raised: ", error.what());
    }
    callback = nullptr;
  }
  current = outer;
  isTaken = false;
  unfinished.fetch_sub(1, std::memory_order_release);
  changed.notify_all();
}

// The last thread without work stays, until the Callbacks are gone.
void Callbacks::State::runThread() {
  for (;;) {
    while (mayBegin()) runNext();
    if (idle > 0 || isStopping) break;  // a running thread comes back for queued callbacks
    ++idle;
    changed.wait(mutex);
    --idle;
  }
  --threads;
  changed.notify_all();
}

void Callbacks::State::giveTurn(Paused& entry) {
  paused.push_back(&entry);
  isPaused = true;
  isTaken = false;
  (void)offerTurn();
}

bool Callbacks::State::retakeTurn(Paused& entry, Deadline deadline) {
  static constexpr std::atomic<Moment> kAtOnce{0};
  const std::atomic<Moment>* const awaited = entry.until;
  for (;;) {
    if (!isTaken && due() == &entry) break;
    if (awaited->load(std::memory_order_acquire) != kNever) {
      changed.wait(mutex);
    } else if (!deadline.passed()) {
      changed.wait_until(mutex, deadline.when());
    } else {
      entry.until = &kAtOnce;
      changed.wait(mutex, [&]() REQUIRES(mutex) { return !isTaken && due() == &entry; });
      break;
    }
  }
  paused.remove(&entry);
  isPaused = false;
  isTaken = true;
  return entry.until == awaited;
}

bool Callbacks::State::drain(Deadline deadline) {
  if (isCallerInside()) return true;
  Lock lock(mutex);
  return changed.wait_until(mutex, deadline.when(), [&] { return isIdle(); });
}

Callbacks::Callbacks() : state_(std::make_shared<State>()) { addDrain(state_); }

Callbacks::~Callbacks() {
  if (state_->generation != forkGeneration()) {
    new std::shared_ptr<State>(state_);  // see ~Completions()
    return;
  }
  Lock lock(state_->mutex);
  state_->isStopping = true;
  state_->changed.notify_all();
  // Threads that have nothing to do are gone by then.
  state_->changed.wait(state_->mutex, [&]() REQUIRES(state_->mutex) { return state_->idle == 0; });
}

void Callbacks::post(std::function<void()> callback) {
  Lock lock(state_->mutex);
  state_->queue.push_back(std::move(callback));
  ++state_->posted;
  state_->unfinished.fetch_add(1);
  if (state_->offerTurn() || state_->threads > 0) return;
  while (state_->mayBegin()) state_->runNext();
}

bool Callbacks::isIdle() const { return state_->isIdle(); }

bool Callbacks::drain(Deadline deadline) { return state_->drain(deadline); }

bool Callbacks::isCallerInside() const { return state_->isCallerInside(); }

// An end that a callback brings about has the moment of that callback.
void Callbacks::stamp(std::atomic<Moment>& moment) {
  Lock lock(state_->mutex);
  moment.store(isCallerInside() ? state_->begun : state_->posted, std::memory_order_release);
  state_->changed.notify_all();
}

// A callback that was posted meanwhile may sleep for this moment: either it sees the 0, or it is
// seen here.
void Callbacks::stampPast(std::atomic<Moment>& moment) {
  moment.exchange(0);
  if (state_->isIdle()) return;
  Lock lock(state_->mutex);
  state_->changed.notify_all();
}

bool Callbacks::await(const std::atomic<Moment>& moment, Deadline deadline) {
  Lock lock(state_->mutex);
  State::Paused entry{&moment};
  state_->giveTurn(entry);
  return state_->retakeTurn(entry, deadline);
}

struct Callbacks::Pause::Entry {
  explicit Entry(std::shared_ptr<State> of) : state(std::move(of)) {}

  const std::shared_ptr<State> state;
  std::atomic<Moment> until{kNever};
  State::Paused paused{&until};
};

Callbacks::Pause::Pause()
    : entry_(State::current && !State::isPaused
                 ? std::make_unique<Entry>(State::current->shared_from_this())
                 : nullptr) {
  if (!entry_) {
    Completions::giveWorkAway();
    return;
  }
  Lock lock(entry_->state->mutex);
  entry_->state->giveTurn(entry_->paused);
}

Callbacks::Pause::~Pause() {
  if (!entry_) return;
  Lock lock(entry_->state->mutex);
  entry_->until.store(0, std::memory_order_release);
  entry_->state->retakeTurn(entry_->paused, Deadline::at(Clock::time_point::max()));
}

}  // namespace mooncake
