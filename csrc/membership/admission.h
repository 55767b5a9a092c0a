#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "membership/join_desk.h"

namespace mooncake {

class Membership;

// How a member lets processes into the job: answers candidates, adds them to the agreement, and keeps
// in mind which processes it has connections to and which ones are out for good. A part of
// Membership, used on the loop's thread.
class Admission {
 public:
  Admission(Membership& job, JoinDesk::Options options) : job_(job), desk_(std::move(options)) {}

  // A message on kJoinTopic.
  void onMessage(const EngineId& from, ByteView message);
  // Returns the rank that a candidate of this term asks for; null: it is none.
  std::optional<int> rankOf(const EngineId& candidate) const;
  // Returns the number of a process that has asked here and takes part already; null: it has not.
  std::optional<int> expects(const EngineId& id);
  bool isFormer(const EngineId& id) const { return former_.contains(id); }

  // Notes the candidates of which reports have told us. Forgets the engines of those that are out
  // for good.
  void meet();
  // A newcomer has become a rank, and there is no connection to it yet.
  void await(const EngineId& newcomer);
  void hasEntered(const EngineId& newcomer);
  void isOut(const EngineId& id) { former_.insert(id); }
  // The process ended: it asks for nothing more.
  void hasEnded(const EngineId& id);
  // Returns "pid 17 on HOST" for the log.
  std::string describe(const EngineId& newcomer) const;

  // Looks for connections that have come, and drops candidates that are silent.
  void look();
  std::optional<Clock::time_point> nextTick() const;

 private:
  // Pause between looks whether a candidate has connected.
  static constexpr auto kLookForPeers = std::chrono::milliseconds(10);

  void onRequest(const EngineId& from, JoinRequest request);
  void isHere(const EngineId& from, const JoinRequest& request);
  void keepEndpoint(const EngineId& from, int rank, const Bytes& endpoint);
  void sendRoster(const EngineId& to);
  void introduce(const EngineId& newcomer, const JoinRequest& request);

  Membership& job_;
  JoinDesk desk_;
  std::map<EngineId, int> candidates_;  // ranks that the candidates of this term ask for
  std::map<EngineId, Clock::time_point>
      unmet_;                  // without a connection to us, and how long they may be
  std::set<EngineId> former_;  // processes that were ranks or candidates, and are out
};

}  // namespace mooncake
