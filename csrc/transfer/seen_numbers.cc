#include "transfer/seen_numbers.h"

#include <algorithm>

namespace mooncake::transfer {

bool SeenNumbers::isNew(const EngineId& from, uint64_t number) {
  const auto known = byId_.find(from);
  if (known != byId_.end()) {
    senders_.splice(senders_.begin(), senders_, known->second);
  } else {
    if (byId_.size() == kMostSenders) {
      byId_.erase(senders_.back().id);
      senders_.pop_back();
    }
    senders_.push_front({from, {}});
    byId_.emplace(from, senders_.begin());
  }
  auto& numbers = senders_.front().numbers;
  if (std::find(numbers.rbegin(), numbers.rend(), number) != numbers.rend()) return false;
  numbers.push_back(number);
  if (numbers.size() > kMostNumbers) numbers.pop_front();
  return true;
}

}  // namespace mooncake::transfer
