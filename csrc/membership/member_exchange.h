#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "membership/membership.h"

namespace mooncake {

// How ranks of a job that make a group of their own tell each other what is needed for it. Over the
// job's connections: no store is asked, and who is lost meanwhile is not waited for. As long as it
// exists, whoever lacks what we said gets it again.
class MemberExchange {
 public:
  struct Options {
    std::string group;          // for messages
    uint64_t topic = 0;         // the same on all members and no other exchange's
    std::vector<int> jobRanks;  // of the members, by their rank in the group
    int rank = 0;               // ours, in the group
  };

  // Tells `mine` to all members.
  MemberExchange(std::shared_ptr<Membership> membership, Options options, Bytes mine);
  ~MemberExchange();
  MemberExchange(const MemberExchange&) = delete;
  MemberExchange& operator=(const MemberExchange&) = delete;

  // What each member told, in rank order; nothing of who is out of the job by now and was not heard
  // of before. Two members may differ in that: then the one that knows less is told of the loss
  // next (Membership::Listener). Errors: we are out ourselves; one could not make the group, and
  // said why; kTimeout names who did not come.
  Result<std::vector<std::optional<Bytes>>> collect(Deadline deadline);
  // We could not make the group: nobody needs to wait for us.
  void giveUp(const Error& why);

 private:
  enum class Kind : uint8_t { kPart = 1, kAsk, kGaveUp };

  void onMessage(const EngineId& from, ByteView message);
  void tell(int rank, Kind kind, ByteView body);
  std::vector<int> missing(const View& view) const;
  Error timedOut(const std::vector<int>& missing) const;

  const std::shared_ptr<Membership> membership_;
  const Options options_;
  const Bytes mine_;
  std::map<EngineId, int> ranksById_;

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::vector<std::optional<Bytes>> parts_;
  std::optional<Error> gaveUp_;
};

}  // namespace mooncake
