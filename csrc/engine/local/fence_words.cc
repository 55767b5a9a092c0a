#include "engine/local/fence_words.h"

#include <utility>

namespace mooncake {

Result<std::shared_ptr<FenceWords>> FenceWords::create(Arena& arena) {
  auto block = arena.allocate(kMost * sizeof(std::atomic<uint32_t>));
  if (!block.ok()) return block.error();
  return std::shared_ptr<FenceWords>(new FenceWords(std::move(*block)));
}

Result<std::shared_ptr<FenceWords::Word>> FenceWords::take() {
  std::lock_guard lock(mutex_);
  uint32_t index = used_;
  if (!free_.empty()) {
    index = free_.back();
    free_.pop_back();
  } else if (used_ == kMost) {
    return Error{ErrorCode::kExhausted, "4096 peers map this arena, or have been shut out of it"};
  } else {
    ++used_;
  }
  return std::make_shared<Word>(weak_from_this(), index,
                                block_.offset() + index * sizeof(std::atomic<uint32_t>));
}

FenceWords::Word::~Word() {
  const auto all = all_.lock();
  if (!all) return;
  std::lock_guard lock(all->mutex_);
  if (all->at(index_).load(std::memory_order_relaxed) == 0) all->free_.push_back(index_);
}

void FenceWords::Word::add(uint32_t flag) {
  if (const auto all = all_.lock()) all->at(index_).fetch_or(flag, std::memory_order_seq_cst);
}

void FenceWords::Word::reset() {
  if (const auto all = all_.lock()) all->at(index_).store(0, std::memory_order_relaxed);
}

bool FenceWords::Word::hasLateWrites() const {
  const auto all = all_.lock();
  if (!all) return false;
  const uint32_t word = all->at(index_).load(std::memory_order_seq_cst);
  return (word & (kFenced | kClosed)) != 0 && word >= kWrite;
}

}  // namespace mooncake
