#include "engine/stream/get_table.h"

namespace mooncake {

// A request's number: generation << 32 | slot.

Result<uint64_t> GetTable::add(const GetRequest& request) {
  std::lock_guard lock(mutex_);
  if (free_.empty()) {
    if (gets_.size() == wire::kMaxGets) {
      return Error{ErrorCode::kExhausted, "1024 gets are under way on this connection"};
    }
    gets_.emplace_back();
    free_.push_back(static_cast<uint32_t>(gets_.size() - 1));
  }
  const uint32_t slot = free_.back();
  free_.pop_back();
  Get& get = gets_[slot];
  get.target = request.target.data();
  get.bytes = request.target.size();
  get.received = 0;
  get.completion = request.completion;
  get.used = true;
  unanswered_.fetch_add(get.bytes, std::memory_order_relaxed);
  get.completion->begin();  // before the request leaves: its answer may be faster than we are
  return uint64_t(get.generation) << 32 | slot;
}

GetTable::Get* GetTable::find(uint64_t request) {
  std::lock_guard lock(mutex_);
  const uint64_t slot = request & 0xffffffff;
  if (slot >= gets_.size()) return nullptr;
  Get& get = gets_[slot];
  return get.used && get.generation == request >> 32 ? &get : nullptr;
}

void GetTable::received(Get& get, uint64_t bytes) {
  get.received += bytes;
  unanswered_.fetch_sub(bytes, std::memory_order_relaxed);
}

void GetTable::finish(uint64_t request, ErrorCode code) {
  const uint32_t slot = static_cast<uint32_t>(request);
  Completion* completion;
  {
    std::lock_guard lock(mutex_);
    Get& get = gets_[slot];
    unanswered_.fetch_sub(get.bytes - get.received, std::memory_order_relaxed);
    completion = get.completion;
    get.completion = nullptr;
    get.used = false;
    ++get.generation;
    free_.push_back(slot);
  }
  if (completion) completion->end(code);
}

void GetTable::cancel(const Completion* completion, ErrorCode code) {
  std::lock_guard lock(mutex_);
  for (Get& get : gets_) {
    if (get.completion == completion) endOne(get, code);
  }
}

void GetTable::cancelAll(ErrorCode code) {
  std::lock_guard lock(mutex_);
  for (Get& get : gets_) endOne(get, code);
}

void GetTable::forget() {
  std::lock_guard lock(mutex_);
  free_.clear();
  for (uint32_t slot = 0; slot < gets_.size(); ++slot) {
    Get& get = gets_[slot];
    endOne(get, ErrorCode::kPeerLost);
    if (get.used) ++get.generation;
    get.used = false;
    free_.push_back(slot);
  }
  unanswered_.store(0, std::memory_order_relaxed);
}

void GetTable::endOne(Get& get, ErrorCode code) {
  if (Completion* completion = std::exchange(get.completion, nullptr)) completion->end(code);
}

}  // namespace mooncake
