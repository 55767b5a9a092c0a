#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <utility>

#include "base/mutex.h"

namespace mooncake {

// Hooks that are called at the beginning of abort(), on its thread.
class AbortHooks {
 public:
  void add(int64_t id, std::function<void()> hook) {
    Lock lock(mutex_);
    hooks_[id] = std::move(hook);
  }
  void remove(int64_t id) {
    Lock lock(mutex_);
    hooks_.erase(id);
  }
  void run() {
    std::map<int64_t, std::function<void()>> hooks;
    {
      Lock lock(mutex_);
      hooks = hooks_;
    }
    for (const auto& [id, hook] : hooks) hook();
  }

 private:
  Mutex mutex_;  // hooks run without it
  std::map<int64_t, std::function<void()>> hooks_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
