#include "backend/coalescing.h"

#include <string>
#include <utility>

#include "backend/arguments.h"

namespace mooncake {
namespace {

// Number of the calling thread. The kernel reuses the id of a thread that has ended; these numbers
// are never used again.
uint64_t thisThread() {
  static std::atomic<uint64_t> next{0};
  thread_local const uint64_t number = next.fetch_add(1, std::memory_order_relaxed);
  return number;
}

// A message of a batch that is not posted yet. torch waits for the batch's work. It waits for this
// one only if the batch's block ended by an exception: endCoalescing() is not called then.
class KeptWork final : public c10d::Work {
 public:
  KeptWork(int rank, c10d::OpType type, std::weak_ptr<Coalescing::Batch> batch)
      : Work(rank, type), batch_(std::move(batch)) {}

  bool isCompleted() override { return false; }
  bool isSuccess() const override { return false; }
  bool wait(std::chrono::milliseconds) override {
    if (const auto batch = batch_.lock()) batch->isAbandoned = true;
    refuse(c10d::opTypeToString(opType_) + " on rank " + std::to_string(rank_) +
           " was not posted: it belongs to a batch of messages, which are posted together when the "
           "batch ends. That batch is dropped now. If its block ended by an exception, call again; "
           "else wait for the batch, after its block");
  }

 private:
  const std::weak_ptr<Coalescing::Batch> batch_;
};

}  // namespace

Coalescing::WorkPtr Coalescing::keep(const std::shared_ptr<Batch>& batch, int rank,
                                     Batch::KeptMessage message) {
  const c10d::OpType type = message.type;
  message.place = batch->works.size();
  batch->messages.push_back(std::move(message));
  batch->works.emplace_back();
  return c10::make_intrusive<KeptWork>(rank, type, batch);
}

void Coalescing::begin() {
  auto batch = std::make_shared<Batch>();
  Lock lock(mutex_);
  batches_[thisThread()].swap(batch);
  open_.store(batches_.size(), std::memory_order_release);
}

std::shared_ptr<Coalescing::Batch> Coalescing::current() {
  if (open_.load(std::memory_order_acquire) == 0) return nullptr;
  std::shared_ptr<Batch> batch;
  {
    Lock lock(mutex_);
    const auto found = batches_.find(thisThread());
    if (found == batches_.end()) return nullptr;
    batch = found->second;
  }
  if (!batch->isAbandoned) return batch;
  (void)end();
  return nullptr;
}

std::shared_ptr<Coalescing::Batch> Coalescing::end() {
  Lock lock(mutex_);
  const auto found = batches_.find(thisThread());
  if (found == batches_.end()) return nullptr;
  std::shared_ptr<Batch> batch = std::move(found->second);
  batches_.erase(found);
  open_.store(batches_.size(), std::memory_order_release);
  return batch;
}

}  // namespace mooncake
