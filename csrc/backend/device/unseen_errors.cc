#include "backend/device/unseen_errors.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "backend/batch_work.h"
#include "backend/collective_work.h"
#include "backend/device/kernel_work.h"
#include "backend/message_work.h"

namespace mooncake {
namespace {

const std::vector<UnseenErrors::WorkPtr>* partsOf(c10d::Work& work) {
  auto* const batch = dynamic_cast<BatchWork*>(&work);
  return batch ? &batch->works() : nullptr;
}

bool hasEnded(c10d::Work& work) {
  if (const auto* parts = partsOf(work))
    return std::ranges::all_of(*parts, [](const auto& part) { return hasEnded(*part); });
  const auto* message = dynamic_cast<MessageWork*>(&work);
  return message ? message->finished() : work.isCompleted();
}

// Returns the error of work that has ended, unless the program has seen it elsewhere: a loss, for
// example. Does not hand it to the program.
std::exception_ptr errorOf(c10d::Work& work) {
  if (const auto* parts = partsOf(work)) {
    for (const auto& part : *parts) {
      if (auto error = errorOf(*part)) return error;
    }
    return nullptr;
  }
  if (const auto* kernel = dynamic_cast<KernelWork*>(&work)) return kernel->ownError();
  if (const auto* collective = dynamic_cast<CollectiveWork*>(&work))
    return collective->isLossSeen() ? nullptr : collective->heldException();
  const auto* message = dynamic_cast<MessageWork*>(&work);
  return !message || message->hasResult() ? nullptr : message->exception();
}

}  // namespace

void UnseenErrors::add(WorkPtr work, Flag isRaised) {
  Lock lock(mutex_);
  entries_.push_back({std::move(work), std::move(isRaised)});
}

UnseenErrors::Unseen UnseenErrors::first() {
  std::vector<Entry> ended;  // dropped without the lock
  Lock lock(mutex_);
  const auto isUnseen = [](const Entry& entry) {
    return !*entry.isRaised && errorOf(*entry.work) != nullptr;
  };
  if (first_.work && !isUnseen(first_)) ended.push_back(std::exchange(first_, {}));
  const auto over = std::stable_partition(entries_.begin(), entries_.end(),
                                          [](const Entry& e) { return !hasEnded(*e.work); });
  for (auto entry = over; entry != entries_.end(); ++entry)
    (first_.work || !isUnseen(*entry) ? ended.emplace_back() : first_) = std::move(*entry);
  entries_.erase(over, entries_.end());
  if (!first_.work) return {};
  return {errorOf(*first_.work), first_.isRaised};
}

}  // namespace mooncake
