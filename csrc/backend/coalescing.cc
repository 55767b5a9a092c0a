#include "backend/coalescing.h"

#include <utility>

namespace mooncake {
namespace {

// Number of the calling thread. The kernel reuses the id of a thread that has ended; these numbers
// are never used again.
uint64_t thisThread() {
  static std::atomic<uint64_t> next{0};
  thread_local const uint64_t number = next.fetch_add(1, std::memory_order_relaxed);
  return number;
}

}  // namespace

void Coalescing::begin() {
  auto batch = std::make_shared<Batch>();
  std::lock_guard lock(mutex_);
  batches_[thisThread()].swap(batch);
  open_.store(batches_.size(), std::memory_order_release);
}

std::shared_ptr<Coalescing::Batch> Coalescing::current() {
  if (open_.load(std::memory_order_acquire) == 0) return nullptr;
  std::shared_ptr<Batch> batch;
  {
    std::lock_guard lock(mutex_);
    const auto found = batches_.find(thisThread());
    if (found == batches_.end()) return nullptr;
    batch = found->second;
  }
  if (!batch->isAbandoned) return batch;
  (void)end();
  return nullptr;
}

std::shared_ptr<Coalescing::Batch> Coalescing::end() {
  std::lock_guard lock(mutex_);
  const auto found = batches_.find(thisThread());
  if (found == batches_.end()) return nullptr;
  std::shared_ptr<Batch> batch = std::move(found->second);
  batches_.erase(found);
  open_.store(batches_.size(), std::memory_order_release);
  return batch;
}

}  // namespace mooncake
