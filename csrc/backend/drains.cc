#include "backend/drains.h"

#include <algorithm>
#include <cstddef>
#include <new>
#include <pthread.h>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace mooncake {
namespace {

// Never destroyed: threads may end after main(). A forked child begins with an empty one: it has
// none of our threads, and a lock that one of them held at the fork would stay held there.
struct Registry {
  Mutex mutex;
  std::vector<std::weak_ptr<Drain>> living GUARDED_BY(mutex);

  static Registry& instance() {
    alignas(Registry) static std::byte memory[sizeof(Registry)];
    static auto* const made = [] {
      ::pthread_atfork(nullptr, nullptr, [] { new (memory) Registry; });
      return new (memory) Registry;
    }();
    return *made;
  }
};

}  // namespace

void addDrain(std::weak_ptr<Drain> drain) {
  Registry& registry = Registry::instance();
  Lock lock(registry.mutex);
  std::erase_if(registry.living, [](const auto& known) { return known.expired(); });
  registry.living.push_back(std::move(drain));
}

bool drainAll(Deadline deadline) {
  std::vector<std::shared_ptr<Drain>> all;
  {
    Registry& registry = Registry::instance();
    Lock lock(registry.mutex);
    for (const auto& known : registry.living) {
      if (auto drain = known.lock()) all.push_back(std::move(drain));
    }
  }
  const auto areIdle = [&] {
    return std::ranges::all_of(
        all, [](const auto& drain) { return drain->isIdle() || drain->isCallerInside(); });
  };
  // One may give work to another.
  while (!areIdle()) {
    for (const auto& drain : all) {
      if (!drain->drain(deadline)) return false;
    }
  }
  return true;
}

}  // namespace mooncake
