// Operations that ran without some living ranks.
#include "membership/flush_machine.h"

namespace mooncake {

SkippingOperation FlushMachine::leftOutOf() const {
  const bool isOut = first_.number != 0 && !first_.contributors.contains(options_.rank);
  return isOut && !isFrozen_ ? first_ : SkippingOperation();
}

GroupRanks FlushMachine::awaitedIn(const SkippingOperation& operation) const {
  GroupRanks awaited;
  for (const int r : decided_) {
    if (operation.contributors.contains(r)) awaited.add(r);
  }
  return awaited;
}

std::optional<SkippingOperation> FlushMachine::takeSkipped(uint64_t number) {
  while (!untold_.empty() && untold_.front().number < number) untold_.pop_front();
  if (untold_.empty() || untold_.front().number != number) return std::nullopt;
  const SkippingOperation one = std::move(untold_.front());
  untold_.pop_front();
  return one;
}

void FlushMachine::rememberSkip(SkippingOperation operation) {
  if (!skipping_.empty() && skipping_.back().number >= operation.number) return;
  if (!operation.contributors.contains(options_.rank)) untold_.push_back(operation);
  skipping_.push_back(std::move(operation));
  while (skipping_.size() > kRememberedSkips) skipping_.pop_front();
}

// The operation that ran without some ranks has ended here.
void FlushMachine::endFirst() {
  if (!errorOf(first_.number)) rememberSkip(std::move(first_));
  first_ = {};
}

FlushActions FlushMachine::skipped() {
  FlushActions actions;
  if (leftOutOf().number == 0) return actions;
  hasEnded(first_.number);  // [skipped]
  while (errorOf(ended_ + 1)) ++ended_;
  actions.emplace_back(FlushAction::End{ended_});
  tellAll(endedNow(), actions);
  return actions;
}

}  // namespace mooncake
