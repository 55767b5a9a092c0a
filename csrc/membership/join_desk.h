#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "membership/join_messages.h"

namespace mooncake {

// The candidates that ask a member to be let in. Pure. A candidate is on the list from its first
// valid request until it is a rank, or has ended, or has asked for nothing for a while.
class JoinDesk {
 public:
  static constexpr size_t kMost = 8;  // candidates at a time; others have to come back

  struct Options {
    std::optional<JobIdentity> identity;  // null: no process is let in
    int size = 0;
    Clock::duration patience{};  // how long a silent candidate stays on the list
  };
  // The member, when it is asked.
  struct Now {
    View view;
    bool isOver = false;    // the member is out of the job
    bool isFormer = false;  // the candidate was a rank or a candidate before
    Clock::time_point time;
  };

  explicit JoinDesk(Options options) : options_(std::move(options)) {}

  // Returns why the request is refused, or null if it is on the list.
  std::optional<JoinRefusal> take(const EngineId& from, const JoinRequest& request, const Now& now);
  // Returns the last request of a process on the list, or null.
  const JoinRequest* find(const EngineId& id) const;
  void remove(const EngineId& id) { waiting_.erase(id); }
  // Removes the candidates that have been silent for too long, and returns them.
  std::vector<EngineId> removeSilent(Clock::time_point now);
  std::optional<Clock::time_point> nextTick() const;

 private:
  struct Waiting {
    JoinRequest request;
    Clock::time_point until;
  };

  std::optional<JoinRefusal> judge(const JoinRequest& request, const Now& now) const;

  const Options options_;
  std::map<EngineId, Waiting> waiting_;
};

}  // namespace mooncake
