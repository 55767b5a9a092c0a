#include "backend/completion_hooks.h"

#include <random>
#include <utility>

namespace mooncake {

// Keys begin at a random number. A recorder sees the keys of several groups, also of other
// backends, which count from 1 or use addresses.
CompletionHooks::CompletionHooks() : hooks_(std::make_shared<Hooks>()) {
  std::random_device source;
  nextKey_ = uint64_t(source()) << 32 | source();
}

void CompletionHooks::add(int64_t id, Hook hook) {
  change([&](Hooks& hooks) { hooks[id] = std::move(hook); });
}

void CompletionHooks::remove(int64_t id) {
  change([&](Hooks& hooks) { hooks.erase(id); });
}

void CompletionHooks::change(const std::function<void(Hooks&)>& how) {
  Lock lock(mutex_);
  auto hooks = std::make_shared<Hooks>(*hooks_);
  how(*hooks);
  any_.store(!hooks->empty(), std::memory_order_release);
  hooks_ = std::move(hooks);
}

void CompletionHooks::tellAll(uint64_t key) const {
  std::shared_ptr<const Hooks> hooks;
  {
    Lock lock(mutex_);
    hooks = hooks_;
  }
  for (const auto& [id, hook] : *hooks) hook(key);
}

}  // namespace mooncake
