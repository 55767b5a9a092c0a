#include "engine/local/direct_gets.h"

#include <algorithm>

namespace mooncake {

DirectGets::Running::Running(DirectGets& gets, const Completion* completion)
    : gets_(gets), completion_(completion) {
  std::lock_guard lock(gets_.mutex_);
  if (gets_.closed_) return;
  gets_.running_.push_back(this);
  entered_ = true;
}

DirectGets::Running::~Running() {
  if (!entered_) return;
  std::lock_guard lock(gets_.mutex_);
  std::erase(gets_.running_, this);
  if (cancelled()) gets_.left_.notify_all();
}

// Under the lock, so that a get does not leave between being found and being told.
template <typename Which>
void DirectGets::end(std::unique_lock<std::mutex>& lock, Which&& which) {
  for (Running* get : running_) {
    if (which(*get)) get->cancelled_.store(true, std::memory_order_relaxed);
  }
  left_.wait(lock, [&] {
    return std::none_of(running_.begin(), running_.end(),
                        [&](Running* get) { return which(*get); });
  });
}

void DirectGets::cancel(const Completion* completion) {
  std::unique_lock lock(mutex_);
  end(lock, [&](const Running& get) { return get.completion_ == completion; });
}

void DirectGets::close() {
  std::unique_lock lock(mutex_);
  closed_ = true;
  end(lock, [](const Running&) { return true; });
}

}  // namespace mooncake
