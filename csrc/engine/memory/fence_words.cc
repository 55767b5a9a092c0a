#include "engine/memory/fence_words.h"

#include <algorithm>
#include <string>
#include <utility>

namespace mooncake {
namespace {

// Number of words that a take() checks when none is free: each check may cost a few system calls.
constexpr size_t kMostLooks = 256;

}  // namespace

Result<std::shared_ptr<FenceWords>> FenceWords::create(Arena& arena) {
  auto block = arena.allocate(kMost * sizeof(std::atomic<uint32_t>));
  if (!block.ok()) return block.error();
  return std::shared_ptr<FenceWords>(new FenceWords(std::move(*block)));
}

Result<std::shared_ptr<FenceWords::Word>> FenceWords::take(pid_t process) {
  Lock lock(mutex_);
  if (free_.empty() && used_ == kMost) reclaim();
  uint32_t index = used_;
  if (!free_.empty()) {
    index = free_.back();
    free_.pop_back();
  } else if (used_ == kMost) {
    return Error{ErrorCode::kExhausted,
                 std::to_string(kMost) +
                     " peers of this host map the memory of this engine, or were fenced and "
                     "still live"};
  } else {
    ++used_;
  }
  return std::make_shared<Word>(weak_from_this(), index,
                                block_.offset() + index * sizeof(std::atomic<uint32_t>), process);
}

// An offered word waits for its peer even if no channel was opened: a slow
// peer sets kLeft later, and would set it in a word that another peer uses by then.
bool FenceWords::tryFree(const Waiting& word) {
  const uint32_t value = at(word.index).load(std::memory_order_seq_cst);
  const bool isFree = !word.isOffered && value == 0;
  if (!isFree && (value & kLeft) == 0 && !word.process.isEnding()) return false;
  at(word.index).store(0, std::memory_order_seq_cst);
  free_.push_back(word.index);
  return true;
}

void FenceWords::reclaim() {
  for (size_t looks = std::min(kMostLooks, waiting_.size()); looks > 0; --looks) {
    const Waiting word = waiting_.front();
    waiting_.pop_front();
    if (!tryFree(word)) waiting_.push_back(word);
  }
}

void FenceWords::Word::release() {
  const auto all = all_.lock();
  if (!all) return;
  Lock lock(all->mutex_);
  if (std::exchange(isReleased_, true)) return;
  const Waiting word{index_, process_, isOffered_.load(std::memory_order_relaxed)};
  if (!all->tryFree(word)) all->waiting_.push_back(word);
}

void FenceWords::Word::add(uint32_t flag) {
  const auto all = all_.lock();
  if (!all) return;
  Lock lock(all->mutex_);  // the word may be reused for another peer at any time
  if (!isReleased_) all->at(index_).fetch_or(flag, std::memory_order_seq_cst);
}

bool FenceWords::Word::hasLateWrites() const {
  const auto all = all_.lock();
  if (!all) return false;
  Lock lock(all->mutex_);
  if (isReleased_) return false;
  const uint32_t word = all->at(index_).load(std::memory_order_seq_cst);
  return (word & (kFenced | kClosed)) != 0 && (word & ~kLeft) >= kWrite;
}

}  // namespace mooncake
