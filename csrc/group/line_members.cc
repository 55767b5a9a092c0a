#include "group/line_members.h"

#include <algorithm>

#include "membership/topics.h"

namespace mooncake {

std::shared_ptr<Membership> LineMembers::job() const {
  Lock lock(mutex_);
  return job_;
}

void LineMembers::use(std::shared_ptr<Membership> job) {
  Lock lock(mutex_);
  job_ = std::move(job);
}

std::optional<int> LineMembers::rankOf(const EngineId& id) const {
  const auto job = this->job();
  for (size_t r = 0; r < jobRanks_.size(); ++r) {
    const auto peer = job->peer(jobRanks_[r]);
    if (peer && peer->id == id) return int(r);
  }
  return std::nullopt;
}

// Whether the newcomer is the one that holds its rank of the job.
bool LineMembers::isLiving(const Newcomer& newcomer) const {
  const auto job = this->job();
  const int jobRank = jobRanks_[size_t(newcomer.rank)];
  if (!job->view().active.contains(jobRank)) return false;
  if (newcomer.rank == rank_) return job->engine().id() == newcomer.id;
  const auto peer = job->peer(jobRank);
  return peer && peer->id == newcomer.id;
}

bool LineMembers::areLiving(const std::vector<Newcomer>& newcomers) const {
  return std::ranges::all_of(newcomers, [&](const Newcomer& one) { return isLiving(one); });
}

void LineMembers::tell(int rank, const LineMessage& message) const {
  const auto job = this->job();
  const int jobRank = jobRanks_[size_t(rank)];
  const auto peer = job->peer(jobRank);
  if (peer && job->view().active.contains(jobRank))
    (void)job->engine().send(*peer, topic_, encodeLineMessage(message));
}

void LineMembers::tellAll(const LineMessage& message) const {
  for (int r = 0; r < size(); ++r) {
    if (r != rank_) tell(r, message);
  }
}

Result<uint64_t> LineMembers::digestOf(const Successor& successor) const {
  const auto topics = topicsOf(successor.identity(identity_));
  if (!topics.ok()) return topics.error();
  return std::max<uint64_t>(topics->first, 1);
}

// The job's roster without processes that are no members: one that was replaced meanwhile, or has
// joined the job and is not ready.
std::shared_ptr<const Roster> LineMembers::rosterOf(const Successor& successor) const {
  auto roster = std::make_shared<Roster>(*job()->roster());
  for (int r = 0; r < size(); ++r) {
    const auto jobRank = size_t(jobRanks_[size_t(r)]);
    auto& holder = roster->term.holders[jobRank];
    if (!holder) continue;
    const auto newcomer = std::ranges::find(successor.newcomers, r, &Newcomer::rank);
    const bool isIn =
        newcomer != successor.newcomers.end()
            ? newcomer->id == holder->id
            : holder->since <= successor.term && !std::ranges::binary_search(successor.absent, r);
    if (isIn) continue;
    holder.reset();
    roster->peers[jobRank] = nullptr;
  }
  return roster;
}

}  // namespace mooncake
