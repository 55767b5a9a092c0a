#include "device/fake/fake_mark.h"

#include <utility>

namespace mooncake {

void FakeMark::happen() { end(State::kHappened); }

void FakeMark::drop() { end(State::kDropped); }

void FakeMark::end(State state) {
  std::lock_guard lock(mutex_);
  if (state_ != State::kAhead) return;
  state_ = state;
  ended_.notify_all();
}

bool FakeMark::hasHappened() {
  std::lock_guard lock(mutex_);
  return state_ == State::kHappened;
}

bool FakeMark::await() {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return state_ != State::kAhead; });
  return state_ == State::kHappened;
}

FakeStream::Task FakeMark::task(std::shared_ptr<FakeMark> mark) {
  // Called when the last copy of the task goes.
  std::shared_ptr<FakeMark> dropped(mark.get(), [mark](FakeMark*) { mark->drop(); });
  return [dropped = std::move(dropped)](FakeStream&) { dropped->happen(); };
}

}  // namespace mooncake
