#include "wires/packets/sent_packets.h"

#include <algorithm>
#include <utility>

namespace mooncake {

void SentPackets::add(uint64_t serial, Sent sent, Clock::time_point now) {
  paths_.began(sent.path, now);
  if (sent_.empty()) progress_ = now;
  sent.leftAt = now;
  sent_.emplace(serial, std::move(sent));
}

void SentPackets::acknowledge(uint64_t below, const std::vector<uint64_t>& above,
                              Clock::time_point now) {
  while (!sent_.empty() && sent_.begin()->first < below) erase(sent_.begin(), now);
  for (const uint64_t serial : above) {
    if (const auto found = sent_.find(serial); found != sent_.end()) erase(found, now);
  }
}

void SentPackets::holdBack(size_t path) {
  for (auto& [serial, sent] : sent_) {
    if (sent.path == path) hold(sent);
  }
}

// Mostly the first packet left last of all, so the loop is rare.
void SentPackets::holdBackOvertaken(Clock::time_point now) {
  if (sent_.empty() || now - sent_.begin()->second.leftAt < paths_.overtakenAfter()) return;
  for (auto& [serial, sent] : sent_) {
    if (paths_.isOvertaken(sent.path, sent.leftAt)) hold(sent);
  }
}

void SentPackets::hold(Sent& sent) {
  if (std::exchange(sent.waits, true)) return;
  ++waiting_;
  paths_.dropped(sent.path);
}

std::optional<uint64_t> SentPackets::firstWaiting(uint64_t from) const {
  if (waiting_ == 0) return std::nullopt;
  const auto found = std::find_if(sent_.lower_bound(from), sent_.end(),
                                  [](const auto& entry) { return entry.second.waits; });
  return found == sent_.end() ? std::nullopt : std::optional(found->first);
}

const SentPackets::Sent& SentPackets::moveTo(size_t path, uint64_t serial, Clock::time_point now) {
  Sent& sent = sent_.at(serial);
  sent.waits = false;
  --waiting_;
  sent.path = path;
  sent.leftAt = now;
  paths_.began(path, now);
  return sent;
}

void SentPackets::drop() {
  for (const auto& [serial, sent] : sent_) {
    if (!sent.waits) paths_.dropped(sent.path);
  }
  clear();
}

void SentPackets::clear() {
  sent_.clear();
  waiting_ = 0;
}

void SentPackets::erase(std::map<uint64_t, Sent>::iterator sent, Clock::time_point now) {
  if (sent->second.waits) {
    --waiting_;
  } else {
    paths_.acknowledged(sent->second.path, sent->second.leftAt, now);
  }
  progress_ = now;
  sent_.erase(sent);
}

}  // namespace mooncake
