#include "backend/loss.h"

#include <pthread.h>
#include <string_view>
#include <utility>

namespace mooncake {
namespace {

thread_local const CallbackScope* innermostScope = nullptr;

bool isAutogradsThread() {
  char name[16] = {};
  return pthread_getname_np(pthread_self(), name, sizeof(name)) == 0 &&
         std::string_view(name).starts_with("pt_autograd");
}

}  // namespace

AttachedCallback::AttachedCallback(CallbackOrigin origin) : origin_(std::move(origin)) {
  if (origin_.attached) origin_.attached->fetch_add(1);
}

void AttachedCallback::end() {
  if (!hasEnded_.exchange(true) && origin_.attached) origin_.attached->fetch_sub(1);
}

CallbackScope::CallbackScope(CallbackOrigin origin)
    : origin_(std::move(origin)), outer_(std::exchange(innermostScope, this)) {}

CallbackScope::~CallbackScope() { innermostScope = outer_; }

bool CallbackScope::isActive() { return innermostScope != nullptr; }

CallbackOrigin CallbackScope::origin() {
  return innermostScope ? innermostScope->origin_ : CallbackOrigin();
}

uint64_t Issuers::thisThread() {
  static std::atomic<uint64_t> last{0};
  thread_local const uint64_t number = ++last;
  return number;
}

void Issuers::add(uint64_t thread) {
  thread_local const bool isLeftOut = isAutogradsThread();
  if (isLeftOut) return;
  Lock lock(mutex_);
  threads_.insert(thread);
}

bool Issuers::includes(uint64_t thread) const {
  Lock lock(mutex_);
  return threads_.empty() || threads_.contains(thread);
}

void Loss::noteRaised() noexcept {
  if (!CallbackScope::isActive() && issuers_->includes(Issuers::thisThread()))
    isSeen_.store(true, std::memory_order_release);
}

}  // namespace mooncake
