#include "group/line_members.h"

#include <algorithm>

#include "base/log.h"
#include "base/rank_list.h"
#include "membership/topics.h"

namespace mooncake {
namespace {

// Roster::kNobody: it is no rank of the job.
int jobRankIn(const Membership& job, const EngineId& id) {
  return job.roster()->term.rankOf(id).value_or(Roster::kNobody);
}

std::string nameKnown(std::vector<int> jobRanks) {
  std::erase(jobRanks, Roster::kNobody);
  return nameRanks(jobRanks);
}

}  // namespace

std::shared_ptr<Membership> LineMembers::job() const {
  Lock lock(mutex_);
  return job_;
}

void LineMembers::use(std::shared_ptr<Membership> job) {
  Lock lock(mutex_);
  job_ = std::move(job);
}

std::vector<int> LineMembers::jobRanks() const {
  Lock lock(mutex_);
  return jobRanks_;
}

void LineMembers::moveTo(const std::vector<int>& jobRanks) {
  Lock lock(mutex_);
  jobRanks_ = jobRanks;
  std::erase_if(waiting_,
                [&](const auto& one) { return jobRanks[size_t(one.first)] != Roster::kNobody; });
}

int LineMembers::jobRank(int rank) const {
  Lock lock(mutex_);
  return jobRanks_[size_t(rank)];
}

int LineMembers::jobRankOf(int rank) const {
  Lock lock(mutex_);
  const auto waits = waiting_.find(rank);
  return waits == waiting_.end() ? jobRanks_[size_t(rank)] : waits->second;
}

std::optional<int> LineMembers::rankOf(const EngineId& id) const {
  const auto job = this->job();
  for (int r = 0; r < size(); ++r) {
    const auto peer = job->peer(jobRankOf(r));
    if (peer && peer->id == id) return r;
  }
  return std::nullopt;
}

std::optional<int> LineMembers::rankOfReady(const EngineId& id, const std::vector<int>& jobRanks) {
  const auto job = this->job();
  const int jobRank = jobRankIn(*job, id);
  const auto place = std::ranges::find(jobRanks, jobRank);
  if (jobRank == Roster::kNobody || place == jobRanks.end()) return std::nullopt;
  const auto rank = int(place - jobRanks.begin());
  Lock lock(mutex_);
  for (size_t r = 0; r < jobRanks.size(); ++r) {
    const bool areKnown = jobRanks[r] != Roster::kNobody && jobRanks_[r] != Roster::kNobody;
    const bool isElsewhere = jobRanks_[r] == jobRank && int(r) != rank;
    if (!isElsewhere && (!areKnown || jobRanks[r] == jobRanks_[r])) continue;
    if (std::exchange(refused_, id) != id)
      log(LogLevel::kWarning, job->engine().logName(), nameKnown({jobRank}),
          " does not come into a group that has ", nameKnown(jobRanks_), " here and ",
          nameKnown(jobRanks),
          " there: a new process makes as many groups as the others have made, in their order");
    return std::nullopt;
  }
  if (jobRanks_[size_t(rank)] == Roster::kNobody) waiting_[rank] = jobRank;
  return rank;
}

std::vector<int> LineMembers::jobRanksWith(const std::vector<Newcomer>& newcomers) const {
  std::vector<int> all = jobRanks();
  const auto job = this->job();
  for (const Newcomer& newcomer : newcomers)
    all[size_t(newcomer.rank)] = jobRankIn(*job, newcomer.id);
  return all;
}

// Whether the newcomer is the one that holds its rank of the job.
bool LineMembers::isLiving(const Newcomer& newcomer) const {
  const auto job = this->job();
  const int jobRank = jobRankIn(*job, newcomer.id);
  const int place = jobRankOf(newcomer.rank);
  if (!job->view().active.contains(jobRank) || (place != jobRank && place != Roster::kNobody))
    return false;
  return job->engine().id() == newcomer.id || job->peer(jobRank) != nullptr;
}

bool LineMembers::areLiving(const std::vector<Newcomer>& newcomers) const {
  return std::ranges::all_of(newcomers, [&](const Newcomer& one) { return isLiving(one); });
}

void LineMembers::tell(int rank, const LineMessage& message) const {
  const auto job = this->job();
  const int jobRank = jobRankOf(rank);
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
    const int jobRank = successor.jobRanks[size_t(r)];
    if (!roster->isHeld(jobRank)) continue;
    auto& holder = roster->term.holders[size_t(jobRank)];
    const auto newcomer = std::ranges::find(successor.newcomers, r, &Newcomer::rank);
    const bool isIn = newcomer != successor.newcomers.end()
                          ? newcomer->id == holder->id
                          : holder->since <= successor.term && !successor.isWithout(r);
    if (isIn) continue;
    holder.reset();
    roster->peers[size_t(jobRank)] = nullptr;
  }
  return roster;
}

}  // namespace mooncake
