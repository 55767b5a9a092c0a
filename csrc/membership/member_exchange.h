#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/mutex.h"
#include "membership/membership.h"
#include "membership/rank_set.h"

namespace mooncake {

// Exchanges one message, the part, between the ranks of a job that make a group of their own. It
// uses the job's connections and no store, and does not wait for ranks that are lost meanwhile. As
// long as it exists, it sends our part again to members that ask for it.
class MemberExchange {
 public:
  struct Options {
    std::string group;          // for error messages
    uint64_t topic = 0;         // the same on all members, and of no other exchange
    std::vector<int> jobRanks;  // global ranks of the members, by their rank in the group
    int rank = 0;               // our rank in the group
    GroupRanks unawaited;       // members that are told our part, and need neither come nor succeed
    // Whose ranks these are: a process that replaces one of them later is no member.
    std::shared_ptr<const Roster> roster;
  };

  // Sends the part `mine` to all members.
  MemberExchange(std::shared_ptr<Membership> membership, Options options, Bytes mine);
  ~MemberExchange();
  MemberExchange(const MemberExchange&) = delete;
  MemberExchange& operator=(const MemberExchange&) = delete;

  // Returns the parts in rank order. A member that is out of the job, and whose part had not come,
  // has none. Two members may differ in that; the one that does not know of the loss hears of it
  // next (Membership::Listener). Errors: this rank is out itself; a member gave up (with its
  // reason); kTimeout names the members that did not come; kInterrupted: `stop` was set.
  Result<std::vector<std::optional<Bytes>>> collect(Deadline deadline,
                                                    const StopSignal* stop = nullptr);
  // Tells the members that we could not make the group, so that they stop waiting for us. If
  // another member gave up, it has told them.
  void giveUp(const Error& why);
  // In place of an exchange: tells the members that we cannot make the group, and returns the error
  // that they get. None of them makes it.
  static Error refuse(const std::shared_ptr<Membership>& membership, const Options& options,
                      const Error& why);

 private:
  enum class Kind : uint8_t { kPart = 1, kAsk, kGaveUp };

  void onMessage(const EngineId& from, ByteView message) EXCLUDES(mutex_);
  void tell(int rank, Kind kind, ByteView body);
  std::vector<int> missing(const View& view) const REQUIRES(mutex_);
  Error timedOut(const std::vector<int>& missing) const REQUIRES(mutex_);

  const std::shared_ptr<Membership> membership_;
  const Options options_;
  const Bytes mine_;
  std::map<EngineId, int> ranksById_;

  Mutex mutex_;
  Condition changed_;
  std::vector<std::optional<Bytes>> parts_ GUARDED_BY(mutex_);
  std::optional<Error> gaveUp_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
