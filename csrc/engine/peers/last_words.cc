#include "engine/peers/last_words.h"

#include <algorithm>
#include <utility>

namespace mooncake {

size_t LastWords::Kept::bytes() const {
  size_t all = sizeof(Kept) + to.size() * sizeof(EngineId);
  for (const Bytes& message : messages) all += sizeof(Bytes) + message.size();
  return all;
}

void LastWords::keep(std::vector<EngineId> to, uint64_t topic, std::vector<Bytes> messages,
                     Clock::time_point now) {
  Lock lock(mutex_);
  dropExpired(now);
  all_.push_back({std::move(to), topic, std::move(messages), now + kept_});
  bytes_ += all_.back().bytes();
  while (bytes_ > kMostBytes) dropOldest();
}

std::vector<LastWords::Word> LastWords::repeat(const EngineId& peer, Clock::time_point now) {
  Lock lock(mutex_);
  dropExpired(now);
  std::vector<Word> words;
  for (Kept& one : all_) {
    if (std::ranges::find(one.to, peer) == one.to.end()) continue;
    one.until = now + kept_;
    for (const Bytes& message : one.messages) words.push_back({one.topic, message});
  }
  return words;
}

void LastWords::dropOldest() {
  bytes_ -= all_.front().bytes();
  all_.pop_front();
}

void LastWords::dropExpired(Clock::time_point now) {
  std::erase_if(all_, [&](const Kept& one) REQUIRES(mutex_) {
    if (one.until > now) return false;
    bytes_ -= one.bytes();
    return true;
  });
}

}  // namespace mooncake
