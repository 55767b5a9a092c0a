#include "backend/device/unseen_errors.h"

#include <utility>

namespace mooncake {

UnseenErrors::Flag UnseenErrors::add(WorkPtr work) {
  auto flag = std::make_shared<std::atomic<bool>>(false);
  std::lock_guard lock(mutex_);
  entries_.push_back({std::move(work), flag});
  return flag;
}

UnseenErrors::Unseen UnseenErrors::first() {
  std::deque<Entry> ended;  // dropped without the lock
  std::lock_guard lock(mutex_);
  // A loss that the program has seen elsewhere is not raised again.
  const auto isUnseen = [](const Entry& entry) {
    return !entry.work->isSuccess() && !*entry.isRaised && !entry.work->isLossSeen();
  };
  if (first_.work && !isUnseen(first_)) ended.push_back(std::exchange(first_, {}));
  while (!entries_.empty() && entries_.front().work->isCompleted()) {
    Entry entry = std::move(entries_.front());
    entries_.pop_front();
    (first_.work || !isUnseen(entry) ? ended.emplace_back() : first_) = std::move(entry);
  }
  if (!first_.work) return {};
  return {first_.work->heldException(), first_.isRaised};
}

}  // namespace mooncake
