#include "device/fake/fake_mark.h"

#include <utility>

namespace mooncake {

void FakeMark::end(State state) {
  Lock lock(mutex_);
  if (state_ != State::kAhead) return;
  state_ = state;
  ended_.notify_all();
}

bool FakeMark::hasHappened() {
  Lock lock(mutex_);
  return state_ == State::kHappened;
}

FakeMark::State FakeMark::awaitEnd() {
  Lock lock(mutex_);
  ended_.wait(mutex_, [&]() REQUIRES(mutex_) { return state_ != State::kAhead; });
  return state_;
}

FakeStream::Task FakeMark::recordTask(std::shared_ptr<FakeMark> mark) {
  // The deleter runs when the last copy of the task goes.
  std::shared_ptr<FakeMark> held(mark.get(), [mark](FakeMark*) { mark->end(State::kDropped); });
  return [held = std::move(held)](FakeStream&) { held->end(State::kHappened); };
}

FakeStream::Task FakeMark::waitTask(std::shared_ptr<FakeMark> mark) {
  return {[mark = std::move(mark)](FakeStream& waiting) {
            if (mark->awaitEnd() == State::kDropped) waiting.halt();
          },
          /*isWait=*/true};
}

}  // namespace mooncake
