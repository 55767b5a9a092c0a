#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

namespace mooncake {

// Hooks that are called at the beginning of abort(), on its thread.
class AbortHooks {
 public:
  void add(int64_t id, std::function<void()> hook) {
    std::lock_guard lock(mutex_);
    hooks_[id] = std::move(hook);
  }
  void remove(int64_t id) {
    std::lock_guard lock(mutex_);
    hooks_.erase(id);
  }
  void run() {
    std::map<int64_t, std::function<void()>> hooks;
    {
      std::lock_guard lock(mutex_);
      hooks = hooks_;
    }
    for (const auto& [id, hook] : hooks) hook();
  }

 private:
  std::mutex mutex_;  // guards hooks_; hooks run without it
  std::map<int64_t, std::function<void()>> hooks_;
};

}  // namespace mooncake
