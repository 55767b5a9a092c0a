#include "membership/join_desk.h"

#include <algorithm>
#include <utility>

namespace mooncake {

std::optional<JoinRefusal> JoinDesk::judge(const JoinRequest& request, const Now& now) const {
  using Reason = JoinRefusal::Reason;
  const auto refuse = [](Reason reason, std::string text) {
    return std::optional(JoinRefusal{reason, std::move(text)});
  };
  const std::string rank = "rank " + std::to_string(request.rank);
  if (!options_.identity) return refuse(Reason::kClosed, "the job lets no process in");
  const JobIdentity& ours = *options_.identity;
  if (request.identity.job != ours.job)
    return refuse(Reason::kJob, "it is another job: '" + ours.job + "' here, '" +
                                    request.identity.job + "' there");
  if (request.identity.mode != ours.mode)
    return refuse(Reason::kMode, "the job runs in mode '" + ours.mode + "', not in mode '" +
                                     request.identity.mode + "'");
  if (request.identity.options != ours.options)
    return refuse(Reason::kOptions,
                  "its options differ from those of the job: start it with the "
                  "same environment and arguments");
  // It may know of fewer: the job grows.
  if (request.size > options_.size)
    return refuse(Reason::kSize, "the job has " + std::to_string(options_.size) + " ranks, not " +
                                     std::to_string(request.size));
  if (request.rank >= options_.size)
    return refuse(Reason::kRange,
                  rank + " is no rank of a job of " + std::to_string(options_.size));
  if (now.isOver) return refuse(Reason::kOver, "the member that was asked is out of the job");
  if (now.isFormer)
    return refuse(Reason::kOlder, "this process was taken out of the job, epoch " +
                                      std::to_string(now.view.epoch) +
                                      " now: join with a new engine");
  if (now.view.active.contains(request.rank))
    return refuse(Reason::kHeld,
                  rank + " is held by a living process in epoch " + std::to_string(now.view.epoch));
  return std::nullopt;
}

std::optional<JoinRefusal> JoinDesk::take(const EngineId& from, const JoinRequest& request,
                                          const Now& now) {
  auto refusal = judge(request, now);
  const bool isKnown = waiting_.contains(from);
  if (!refusal && !isKnown && waiting_.size() >= kMost) {
    refusal = {JoinRefusal::Reason::kBusy, "the job lets in " + std::to_string(kMost) +
                                               " processes at a time: come back later"};
  }
  if (refusal) {
    waiting_.erase(from);
    return refusal;
  }
  waiting_[from] = {request, now.time + options_.patience};
  return std::nullopt;
}

const JoinRequest* JoinDesk::find(const EngineId& id) const {
  const auto found = waiting_.find(id);
  return found == waiting_.end() ? nullptr : &found->second.request;
}

std::vector<EngineId> JoinDesk::removeSilent(Clock::time_point now) {
  std::vector<EngineId> silent;
  std::erase_if(waiting_, [&](const auto& entry) {
    if (now < entry.second.until) return false;
    silent.push_back(entry.first);
    return true;
  });
  return silent;
}

std::optional<Clock::time_point> JoinDesk::nextTick() const {
  std::optional<Clock::time_point> next;
  for (const auto& [id, waiting] : waiting_)
    next = next ? std::min(*next, waiting.until) : waiting.until;
  return next;
}

}  // namespace mooncake
