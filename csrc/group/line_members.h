#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "group/line_words.h"
#include "membership/membership.h"

namespace mooncake {

// The ranks of a group over time: which processes of the job they are now, and words to them.
class LineMembers {
 public:
  // `jobRanks`: by rank of the group. `identity`: of the line.
  LineMembers(std::shared_ptr<Membership> job, std::string identity, int rank,
              std::vector<int> jobRanks)
      : identity_(std::move(identity)),
        rank_(rank),
        jobRanks_(std::move(jobRanks)),
        job_(std::move(job)) {}

  std::shared_ptr<Membership> job() const EXCLUDES(mutex_);
  // This process has come back into the job, as another member of it.
  void use(std::shared_ptr<Membership> job) EXCLUDES(mutex_);

  // Before the first word. 0: none yet.
  void useTopic(uint64_t topic) { topic_ = topic; }
  uint64_t topic() const { return topic_; }

  int size() const { return static_cast<int>(jobRanks_.size()); }
  std::optional<int> rankOf(const EngineId& id) const;
  bool isLiving(const Newcomer& newcomer) const;
  bool areLiving(const std::vector<Newcomer>& newcomers) const;  // all of them
  // A lost word is told again by the caller, or asked for.
  void tell(int rank, const LineMessage& message) const;
  void tellAll(const LineMessage& message) const;
  // The name of a successor: never 0.
  Result<uint64_t> digestOf(const Successor& successor) const;
  std::shared_ptr<const Roster> rosterOf(const Successor& successor) const;

 private:
  const std::string identity_;
  const int rank_;
  const std::vector<int> jobRanks_;
  uint64_t topic_ = 0;
  mutable Mutex mutex_;
  std::shared_ptr<Membership> job_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
