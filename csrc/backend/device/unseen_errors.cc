#include "backend/device/unseen_errors.h"

#include <utility>

#include "backend/collective_work.h"

namespace mooncake {
namespace {

// Somebody who waits for another work of the group has seen the loss.
bool isLossSeen(const c10d::Work& work) {
  const auto* const collective = dynamic_cast<const CollectiveWork*>(&work);
  return collective && collective->isLossSeen();
}

}  // namespace

UnseenErrors::Flag UnseenErrors::add(WorkPtr work) {
  auto flag = std::make_shared<std::atomic<bool>>(false);
  std::lock_guard lock(mutex_);
  entries_.push_back({std::move(work), flag});
  return flag;
}

UnseenErrors::Unseen UnseenErrors::first() {
  std::deque<Entry> ended;  // dropped without the lock
  std::lock_guard lock(mutex_);
  if (first_.error && *first_.isRaised) first_ = {};
  while (!entries_.empty() && entries_.front().work->isCompleted()) {
    Entry& entry = ended.emplace_back(std::move(entries_.front()));
    entries_.pop_front();
    if (!first_.error && !entry.work->isSuccess() && !*entry.isRaised && !isLossSeen(*entry.work))
      first_ = {entry.work->exception(), entry.isRaised};
  }
  return first_;
}

}  // namespace mooncake
