#include "transfer/batch.h"

namespace mooncake::transfer {

std::shared_ptr<Batch> BatchTable::add(size_t capacity) {
  Lock lock(mutex_);
  if (capacity == 0 || capacity > kMostTasks - tasks_) return nullptr;
  tasks_ += capacity;
  auto batch = std::make_shared<Batch>(++lastId_, capacity);
  batches_.emplace(batch->id, batch);
  return batch;
}

std::shared_ptr<Batch> BatchTable::find(uint64_t id) const {
  Lock lock(mutex_);
  const auto found = batches_.find(id);
  return found == batches_.end() ? nullptr : found->second;
}

Code BatchTable::release(uint64_t id) {
  std::shared_ptr<Batch> released;  // goes without the lock
  Lock lock(mutex_);
  const auto found = batches_.find(id);
  if (found == batches_.end()) return kInvalid;
  if (!found->second->isOver()) return kBatchBusy;
  released = std::move(found->second);
  tasks_ -= released->capacity;
  batches_.erase(found);
  return kGood;
}

std::vector<std::shared_ptr<Batch>> BatchTable::all() const {
  Lock lock(mutex_);
  std::vector<std::shared_ptr<Batch>> all;
  for (const auto& [id, batch] : batches_) all.push_back(batch);
  return all;
}

}  // namespace mooncake::transfer
