#include "backend/device/unseen_errors.h"

#include <exception>
#include <utility>

#include "backend/collective_work.h"

namespace mooncake {

UnseenErrors::Flag UnseenErrors::add(WorkPtr work) {
  auto flag = std::make_shared<std::atomic<bool>>(false);
  std::lock_guard lock(mutex_);
  entries_.push_back({std::move(work), flag});
  return flag;
}

void UnseenErrors::raise() {
  std::deque<Entry> ended;  // dropped without the lock
  std::exception_ptr first;
  {
    std::lock_guard lock(mutex_);
    while (!entries_.empty() && entries_.front().work->isCompleted()) {
      Entry& entry = ended.emplace_back(std::move(entries_.front()));
      entries_.pop_front();
      const auto* collective = dynamic_cast<const CollectiveWork*>(entry.work.get());
      if (first || entry.work->isSuccess() || entry.isRaised->exchange(true) ||
          (collective && collective->isLossSeen()))
        continue;
      first = entry.work->exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace mooncake
