#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "group/line_words.h"
#include "membership/membership.h"

namespace mooncake {

// The ranks of a group over time: which processes of the job they are now, and words to them. The
// group may have places that no rank of the job has had yet.
class LineMembers {
 public:
  // `jobRanks`: by rank of the group; Roster::kNobody for such a place. `identity`: of the line.
  LineMembers(std::shared_ptr<Membership> job, std::string identity, int rank,
              std::vector<int> jobRanks)
      : identity_(std::move(identity)),
        rank_(rank),
        size_(static_cast<int>(jobRanks.size())),
        job_(std::move(job)),
        jobRanks_(std::move(jobRanks)) {}

  std::shared_ptr<Membership> job() const EXCLUDES(mutex_);
  // This process has come back into the job, as another member of it.
  void use(std::shared_ptr<Membership> job) EXCLUDES(mutex_);

  // Before the first word. 0: none yet.
  void useTopic(uint64_t topic) { topic_ = topic; }
  uint64_t topic() const { return topic_; }

  int size() const { return size_; }
  std::vector<int> jobRanks() const EXCLUDES(mutex_);
  int jobRank(int rank) const EXCLUDES(mutex_);
  std::optional<int> rankOf(const EngineId& id) const EXCLUDES(mutex_);
  // The rank of a newcomer that is ready, and says that the group has these ranks of the job. Nullopt:
  // the group has others, or the process is no rank of the job.
  std::optional<int> rankOfReady(const EngineId& id, const std::vector<int>& jobRanks)
      EXCLUDES(mutex_);
  // By rank of the group: the ranks that a series with these newcomers has. Each is known.
  std::vector<int> jobRanksWith(const std::vector<Newcomer>& newcomers) const EXCLUDES(mutex_);
  // The group goes on with these ranks.
  void moveTo(const std::vector<int>& jobRanks) EXCLUDES(mutex_);
  bool isLiving(const Newcomer& newcomer) const;
  bool areLiving(const std::vector<Newcomer>& newcomers) const;  // all of them
  // A lost word is told again by the caller, or asked for.
  void tell(int rank, const LineMessage& message) const;
  void tellAll(const LineMessage& message) const;
  // The name of a successor: never 0.
  Result<uint64_t> digestOf(const Successor& successor) const;
  std::shared_ptr<const Roster> rosterOf(const Successor& successor) const;

 private:
  int jobRankOf(int rank) const EXCLUDES(mutex_);  // also of one that waits

  const std::string identity_;
  const int rank_;
  const int size_;
  uint64_t topic_ = 0;
  mutable Mutex mutex_;
  std::shared_ptr<Membership> job_ GUARDED_BY(mutex_);
  std::vector<int> jobRanks_ GUARDED_BY(mutex_);  // of the present series
  // By rank of the group: ranks of the job that wait for a place that nobody has had.
  std::map<int, int> waiting_ GUARDED_BY(mutex_);
  EngineId refused_ GUARDED_BY(mutex_){};  // the last newcomer that named other ranks
};

}  // namespace mooncake
