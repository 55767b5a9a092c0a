#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>

#include "device/fake/fake_capture.h"

namespace mooncake {

// One record() of an event. It ends once: it happens, or is dropped with the stream's work.
class FakeMark {
 public:
  // Marks a point in a stream's work.
  FakeMark() = default;
  // Marks a point in a graph. It never happens.
  FakeMark(std::shared_ptr<FakeCapture> capture, FakeCapture::Place place)
      : capture_(std::move(capture)), place_(std::move(place)) {}

  const std::shared_ptr<FakeCapture>& capture() const { return capture_; }
  const FakeCapture::Place& place() const { return place_; }

  void happen();
  void drop();
  bool hasHappened();
  // Waits for the end. Returns false if the mark was dropped: its stream was halted, and the waiting
  // one must not go on. Only the threads of streams call this: each has work that ends, or is halted.
  bool await();

  // Returns the task that makes the mark happen. If it goes without having run, it drops the mark.
  static FakeStream::Task task(std::shared_ptr<FakeMark> mark);

 private:
  enum class State { kAhead, kHappened, kDropped };
  void end(State state);

  const std::shared_ptr<FakeCapture> capture_;
  const FakeCapture::Place place_;
  std::mutex mutex_;  // guards state_
  std::condition_variable ended_;
  State state_ = State::kAhead;
};

}  // namespace mooncake
