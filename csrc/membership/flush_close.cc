// How the members of a group agree on the end of its series.
#include <algorithm>

#include "membership/flush_machine.h"

namespace mooncake {

std::optional<FlushActions> FlushMachine::readyFor(uint64_t successor) {
  FlushActions actions;
  const auto place = std::ranges::lower_bound(ready_, successor);
  if (place != ready_.end() && *place == successor) return actions;
  if (ready_.size() == kMostSuccessors) return std::nullopt;
  ready_.insert(place, successor);  // [prepared]
  tellAll(endedNow(), actions);
  return actions;
}

FlushActions FlushMachine::notReadyFor(uint64_t successor) {
  FlushActions actions;
  if (wish_ == successor) wishesFor(0, {});
  if (std::erase(ready_, successor) > 0) tellAll(endedNow(), actions);
  return actions;
}

// The members that are ready have told it. Their messages may be lost, so they are asked.
void FlushMachine::wishesFor(uint64_t successor, Clock::time_point now) {
  wish_ = close_ ? 0 : successor;  // [wish-to-move]
  asking_.reset();
  if (wish_ != 0)
    asking_.emplace(Repetition::Limits{options_.resend, kMostResend * options_.resend}, now);
}

std::vector<int> FlushMachine::unready(uint64_t successor) const {
  std::vector<int> ranks;
  std::ranges::copy_if(active_, std::back_inserter(ranks), [&](int r) {
    const auto& ready = r == options_.rank ? ready_ : peersReady_[size_t(r)];
    return !left_.contains(r) && !std::ranges::binary_search(ready, successor);
  });
  return ranks;
}

bool FlushMachine::wantsToMove() const {
  return wish_ != 0 && !isFrozen_ && !isOver_ && !leaveReport_ && unready(wish_).empty();
}

FlushActions FlushMachine::move(Clock::time_point now) {
  FlushActions actions;
  if (!wantsToMove()) return actions;
  const Attempt next{attempt_.losses, attempt_.round + 1};
  join(next, "this rank wishes to move", now, actions);  // [start-round]
  return actions;
}

void FlushMachine::askTheUnready(Clock::time_point now, FlushActions& actions) {
  if (!asking_ || !asking_->takeDue(now) || isFrozen_ || leaveReport_) return;
  std::vector<int> askFor = unready(wish_);
  std::erase(askFor, options_.rank);
  if (!askFor.empty())
    actions.emplace_back(FlushAction::Tell{std::move(askFor), {.kind = FlushMessage::Kind::kAsk}});
}

std::optional<Clock::time_point> FlushMachine::nextTick() const {
  if (!repeat_ || !asking_) {
    const auto& only = repeat_ ? repeat_ : asking_;
    return only ? std::optional(only->next()) : std::nullopt;
  }
  return std::min(repeat_->next(), asking_->next());
}

void FlushMachine::closes(const SeriesClose& close) {
  close_ = close;
  wish_ = 0;
  asking_.reset();
}

// The later flush for which a leaver has reported whose report of this flush has not come. Another
// member may have decided a close with that report, if all were ready; then we must not go on
// without the close. In the later flush that member says it.
std::optional<Attempt> FlushMachine::laterFlushOfLeaver() const {
  if (lastSaid_.ready.empty()) return std::nullopt;
  for (const auto& [rank, last] : left_) {
    if (isInView(rank) && !reports_.contains(rank) && last.attempt > target_) return last.attempt;
  }
  return std::nullopt;
}

}  // namespace mooncake
