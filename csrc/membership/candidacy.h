#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/stop_signal.h"
#include "membership/join_messages.h"
#include "membership/membership.h"

namespace mooncake {

// A newcomer's way into a running job: see Membership::join(). One thread runs it.
class Candidacy final : public Membership::Listener {
 public:
  Candidacy(std::shared_ptr<Engine> engine, JoinOptions options, Deadline deadline,
            const StopSignal* stop);
  ~Candidacy() override { engine_->closeTopic(kJoinTopic); }

  Result<std::shared_ptr<Membership>> run();

  void onView(const View& view) override {
    Lock lock(mutex_);
    view_ = view;
    changed_.notify_all();
  }
  void onRoster(const std::shared_ptr<const Roster>& roster) override {
    Lock lock(mutex_);
    roster_ = roster;
    changed_.notify_all();
  }
  void onOver(const Error& why) override {
    Lock lock(mutex_);
    over_ = why;
    changed_.notify_all();
  }

 private:
  static constexpr size_t kMostMessages = 1024;
  // A roster as members have sent it.
  struct Asked {
    Term term;
    View view;
    std::vector<Bytes> endpoints;
    JobRanks missing;  // ranks of which no part has come
  };

  JoinRequest request() const;
  Error timedOut() const;
  Error givesUp() const;
  Result<Asked> ask(Peer& member);
  Result<std::shared_ptr<Roster>> connectAll(const Asked& asked);
  Result<std::shared_ptr<Membership>> enter(const Asked& asked, std::shared_ptr<Roster> roster);
  // Connects to the candidates of which a member has told us.
  void meet(const JoinMessage& message);
  // Adds a part of a roster; a part of another one begins anew.
  void take(const RosterPart& part, std::optional<Asked>& asked) const;
  std::optional<std::pair<EngineId, JoinMessage>> next(Deadline until);
  bool hasEntered() const REQUIRES(mutex_);
  // Returns whether this process is a rank and has connections to all others.
  bool isThrough() const REQUIRES(mutex_);
  bool isStopped() const { return stop_ && stop_->isStopped(); }

  const std::shared_ptr<Engine> engine_;
  const JoinOptions options_;
  const Deadline deadline_;
  const StopSignal* const stop_;
  const std::chrono::milliseconds resend_;
  std::string last_;        // why the last attempt failed
  bool isOffered_ = false;  // some member may have added us

  Mutex mutex_;
  Condition changed_;
  std::deque<std::pair<EngineId, JoinMessage>> inbox_ GUARDED_BY(mutex_);
  // Of the Membership, since it follows the job.
  View view_ GUARDED_BY(mutex_);
  std::shared_ptr<const Roster> roster_ GUARDED_BY(mutex_);
  std::optional<Error> over_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
