#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include "base/deadline.h"
#include "base/mutex.h"
#include "base/result.h"
#include "device/accelerator.h"
#include "device/fake/fake_queue.h"

namespace mooncake {

// A stream of a fake device: a thread that runs tasks in the order of the calls. The thread starts
// with the first task. Thread-safe.
class FakeStream {
 public:
  struct Task {
    Task() = default;
    template <typename Work>
    requires std::is_invocable_v<Work&, FakeStream&> Task(Work work, bool isWait = false)
        : run(std::move(work)), isWait(isWait) {}

    // Gets the stream that runs it, which is another one if a graph is replayed.
    std::function<void(FakeStream&)> run;
    bool isWait = false;  // for a word or an event: see FakeQueue
  };

  // `queue`: null, the stream has one of its own.
  explicit FakeStream(DeviceStream id, std::shared_ptr<FakeQueue> queue = nullptr);
  ~FakeStream();  // halt(), then waits for the end of the task that runs

  DeviceStream id() const { return id_; }
  const std::string& name() const { return name_; }  // "stream 2 of fake device 0"

  // kExhausted if the thread cannot be started, kSystem after halt(). Takes the task only if it
  // returns ok: the caller may hold locks, which a destructor of the task's objects may need.
  Status enqueue(Task&& task);
  // Keeps `object` until the tasks so far are over.
  void retain(std::shared_ptr<void> object);
  // Waits until the tasks so far are over. kSystem if halt() comes first.
  Status synchronize();
  bool isIdle();

  // The thread ends after the last task.
  void close();
  // Drops the tasks that have not begun, and ends awaitWord(). Later calls fail.
  void halt();
  // The first half of halt(): no task begins any more, but tasks that wait for the queue stay there.
  void stop();
  // The thread is over, or was never there.
  bool hasEnded();
  // Waits for the end of the thread, at most until the deadline.
  void join(Deadline deadline);

  // For tasks, on this stream's thread: waits until int32_t(*word - value) >= 0. The host need not
  // notify the word. Returns false if halt() comes first.
  bool awaitWord(const StreamWord* word, uint32_t value);

 private:
  struct Place {
    Task task;
    FakeQueue::Ticket ticket = 0;  // 0: the task is in no queue
  };

  void run() EXCLUDES(mutex_);
  // Runs the task at its turn in the queue, or drops it after halt().
  void runInTurn(Place& place);
  // Makes room in the queue for a task that began, ended or was dropped.
  void pass(const Place& place);

  const DeviceStream id_;
  const std::string name_;
  const std::shared_ptr<FakeQueue> queue_;  // null: no other stream shares it

  Mutex mutex_;
  Condition changed_;
  std::deque<Place> tasks_ GUARDED_BY(mutex_);
  uint64_t enqueued_ GUARDED_BY(mutex_) = 0;  // number of tasks
  uint64_t done_ GUARDED_BY(mutex_) = 0;
  bool isClosed_ GUARDED_BY(mutex_) = false;
  std::atomic<bool> isHalted_ = false;      // FakeQueue reads it without the lock
  bool isOver_ GUARDED_BY(mutex_) = false;  // the thread runs no task any more
  std::thread thread_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
