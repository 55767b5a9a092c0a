#include "engine/local/direct_transfers.h"

#include <algorithm>

namespace mooncake {

DirectTransfers::Running::Running(DirectTransfers& transfers, const Completion* completion)
    : transfers_(transfers), completion_(completion) {
  std::lock_guard lock(transfers_.mutex_);
  if (transfers_.closed_) return;
  transfers_.running_.push_back(this);
  entered_ = true;
}

DirectTransfers::Running::~Running() {
  if (!entered_) return;
  std::lock_guard lock(transfers_.mutex_);
  std::erase(transfers_.running_, this);
  if (cancelled()) transfers_.left_.notify_all();
}

// Runs under the lock, so that no transfer leaves between being found and being cancelled.
template <typename Which>
void DirectTransfers::end(std::unique_lock<std::mutex>& lock, Which&& which) {
  for (Running* one : running_) {
    if (which(*one)) one->cancelled_.store(true, std::memory_order_relaxed);
  }
  left_.wait(lock, [&] {
    return std::none_of(running_.begin(), running_.end(),
                        [&](Running* one) { return which(*one); });
  });
}

void DirectTransfers::cancel(const Completion* completion) {
  std::unique_lock lock(mutex_);
  end(lock, [&](const Running& one) { return one.completion_ == completion; });
}

void DirectTransfers::close() {
  std::unique_lock lock(mutex_);
  closed_ = true;
  end(lock, [](const Running&) { return true; });
}

}  // namespace mooncake
