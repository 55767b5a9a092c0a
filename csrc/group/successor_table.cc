#include "group/successor_table.h"

#include <algorithm>

namespace mooncake {
namespace {

// Digests of given up successors that are kept.
constexpr size_t kMostGivenUp = 64;

// True if the caller of remove() may be lost. A later call must not carry its removal out.
bool lacksAsker(const Successor& successor, const std::vector<bool>& active) {
  if (!successor.newcomers.empty()) return false;
  for (int r = 0; r < int(active.size()); ++r) {
    if (!active[size_t(r)] && !std::ranges::binary_search(successor.absent, r)) return true;
  }
  return false;
}

}  // namespace

Preparation* SuccessorTable::find(uint64_t digest) {
  const auto one = entries_.find(digest);
  return one == entries_.end() ? nullptr : &one->second;
}

const Preparation* SuccessorTable::find(uint64_t digest) const {
  const auto one = entries_.find(digest);
  return one == entries_.end() ? nullptr : &one->second;
}

bool SuccessorTable::mayAdd(uint64_t digest) const {
  return !entries_.contains(digest) && !givenUp_.contains(digest);
}

void SuccessorTable::add(uint64_t digest, Preparation preparation) {
  entries_.emplace(digest, std::move(preparation));
}

Preparation SuccessorTable::giveUp(uint64_t digest) {
  const auto one = entries_.find(digest);
  Preparation gone = std::move(one->second);
  entries_.erase(one);
  if (!gone.failure.ok()) lastFailure_ = {digest, gone.failure};
  givenUp_.insert(digest);
  return gone;
}

bool SuccessorTable::noteGivenUp(uint64_t digest) {
  if (Preparation* one = find(digest)) {
    one->isGivenUp = true;
    return true;
  }
  if (givenUp_.size() < kMostGivenUp) givenUp_.insert(digest);
  return false;
}

SuccessorTable::Entries SuccessorTable::takeAll() {
  givenUp_.clear();
  return std::exchange(entries_, {});
}

// Only for members. A newcomer cannot know: members may move to it without the rank that has given it
// up or proposed it, once that one is lost.
bool SuccessorTable::isVoid(const Preparation& one, const std::vector<bool>& active) const {
  const Successor& successor = one.successor;
  if (one.isGivenUp || !one.failure.ok() || lacksAsker(successor, active)) return true;
  return (successor.proposer != rank_ && !active[size_t(successor.proposer)]) ||
         !members_.areLiving(successor.newcomers);
}

const SuccessorTable::Entries::value_type* SuccessorTable::living(
    const std::vector<bool>& active) const {
  const Entries::value_type* best = nullptr;
  for (const auto& entry : entries_) {
    if (isVoid(entry.second, active)) continue;
    if (!best || entry.second.successor.proposer < best->second.successor.proposer) best = &entry;
  }
  return best;
}

std::vector<uint64_t> SuccessorTable::voids(const std::vector<bool>& active) const {
  std::vector<uint64_t> digests;
  for (const auto& [digest, one] : entries_) {
    if (isVoid(one, active)) digests.push_back(digest);
  }
  return digests;
}

bool SuccessorTable::hasNewcomer(const Newcomer& newcomer) const {
  return std::ranges::any_of(entries_, [&](const auto& entry) {
    return std::ranges::count(entry.second.successor.newcomers, newcomer) > 0;
  });
}

bool SuccessorTable::areAllMade() const {
  return std::ranges::all_of(entries_, [](const auto& entry) { return entry.second.isMade(); });
}

Status SuccessorTable::failureOf(uint64_t digest) const {
  const auto one = entries_.find(digest);
  if (one != entries_.end()) return one->second.failure;
  return lastFailure_.first == digest ? lastFailure_.second : Status();
}

}  // namespace mooncake
