#pragma once

#include <memory>

#include "base/mutex.h"
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

  bool hasHappened();
  // The tasks of the stream that records the event, and of one that waits for it. If the first goes
  // without having run, the mark is dropped: its stream was halted. Then the second halts its own
  // stream, which must not go on.
  static FakeStream::Task recordTask(std::shared_ptr<FakeMark> mark);
  static FakeStream::Task waitTask(std::shared_ptr<FakeMark> mark);

 private:
  enum class State { kAhead, kHappened, kDropped };
  // Only the first end counts.
  void end(State state) EXCLUDES(mutex_);
  State awaitEnd() EXCLUDES(mutex_);

  const std::shared_ptr<FakeCapture> capture_;
  const FakeCapture::Place place_{};
  Mutex mutex_;
  Condition ended_;
  State state_ GUARDED_BY(mutex_) = State::kAhead;
};

}  // namespace mooncake
