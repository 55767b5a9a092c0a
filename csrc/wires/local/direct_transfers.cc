#include "wires/local/direct_transfers.h"

#include <algorithm>

namespace mooncake {

DirectTransfers::Running::Running(DirectTransfers& transfers, const Completion* completion)
    : transfers_(transfers), completion_(completion) {
  Lock lock(transfers_.mutex_);
  if (transfers_.closed_) return;
  transfers_.running_.push_back(this);
  entered_ = true;
}

DirectTransfers::Running::~Running() {
  if (!entered_) return;
  Lock lock(transfers_.mutex_);
  std::erase(transfers_.running_, this);
  if (cancelled()) transfers_.left_.notify_all();
}

// The lock is held, so that no transfer leaves between being found and being cancelled.
template <typename Which>
void DirectTransfers::end(Which&& which) {
  for (Running* one : running_) {
    if (which(*one)) one->cancelled_.store(true, std::memory_order_relaxed);
  }
  left_.wait(mutex_, [&]() REQUIRES(mutex_) {
    return std::none_of(running_.begin(), running_.end(),
                        [&](Running* one) { return which(*one); });
  });
}

void DirectTransfers::cancel(const Completion* completion) {
  Lock lock(mutex_);
  end([&](const Running& one) { return one.completion_ == completion; });
}

void DirectTransfers::close() {
  Lock lock(mutex_);
  closed_ = true;
  end([](const Running&) { return true; });
}

}  // namespace mooncake
