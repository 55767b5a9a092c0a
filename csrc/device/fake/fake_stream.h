#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/deadline.h"
#include "base/result.h"
#include "device/accelerator.h"

namespace mooncake {

// A stream of a fake device: a thread that runs tasks in the order of the calls. The thread starts
// with the first task. Thread-safe.
class FakeStream {
 public:
  // Gets the stream that runs it, which is another one if a graph is replayed.
  using Task = std::function<void(FakeStream&)>;

  explicit FakeStream(DeviceStream id);
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
  // The thread is over, or was never there.
  bool hasEnded();
  // Waits for the end of the thread, at most until the deadline.
  void join(Deadline deadline);

  // For tasks, on this stream's thread: waits until int32_t(*word - value) >= 0. The host need not
  // notify the word. Returns false if halt() comes first.
  bool awaitWord(const StreamWord* word, uint32_t value);

 private:
  void run();

  const DeviceStream id_;
  const std::string name_;

  std::mutex mutex_;  // guards the fields below
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t enqueued_ = 0;  // number of tasks
  uint64_t done_ = 0;
  bool isClosed_ = false;
  bool isHalted_ = false;
  bool isOver_ = false;  // the thread runs no task any more
  std::thread thread_;
};

}  // namespace mooncake
