#include "gate.h"

#include "streams.h"

namespace fake_device {

Gate::Gate(const c10::Stream& stream) {
  enqueue(stream, [state = state_] {
    std::unique_lock lock(state->mutex);
    state->opened.wait(lock, [&] { return state->isOpen; });
  });
}

Gate::~Gate() { open(); }

void Gate::open() {
  const std::lock_guard lock(state_->mutex);
  state_->isOpen = true;
  state_->opened.notify_all();
}

}  // namespace fake_device
