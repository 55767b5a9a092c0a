#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "base/stop_signal.h"
#include "engine/engine.h"
#include "membership/admission.h"
#include "membership/held_reports.h"
#include "membership/join_options.h"
#include "membership/roster.h"
#include "membership/view_agreement.h"

namespace mooncake {

// The topic (engine/peers/message_router.h) of the reports.
inline constexpr uint64_t kMembershipTopic = 1;

// Drives ViewAgreement: feeds it the evidence and the reports of peers; sends, logs and announces
// its results. One per engine, shared by all groups of the job.
class Membership {
 public:
  struct Options {
    int rank = 0;  // global rank of this process
    // By global rank; null for this one, and for ranks that are out from the beginning.
    std::vector<std::shared_ptr<Peer>> peers;
    // The first ranks, which are there unless they are out; 0: all. There is room for the other ones.
    int founders = 0;
    std::chrono::milliseconds failureTimeout{3000};
    std::string waitsFile;  // see loss_waits.h
    // If set, a process that has the same identity may take over a rank that is out (join()). Set it
    // on all ranks, or on none.
    std::optional<JobIdentity> identity;
  };

  // A group. Called on the engine's loop thread, one call at a time; must not block.
  class Listener {
   public:
    virtual ~Listener() = default;
    // A later view was committed. Excluded ranks are fenced before this call: nothing that they
    // send or fetch has any effect here (Channel::fence). The active ranks are those of the
    // listener's roster: a rank that was replaced stays out of it, though the job has a new holder.
    virtual void onView(const View& view) = 0;
    // Processes have become ranks of the job: it goes on with this roster. Follows onView().
    virtual void onRoster(const std::shared_ptr<const Roster>&) {}
    // This rank is out for good (kEvicted), or on the smaller side of a partition (kMinority).
    // Afterwards the driver says goodbye for this engine: its channels close.
    virtual void onOver(const Error& why) = 0;
    // The connection to this rank was made again: data put or sent either way may be lost.
    virtual void onReconnected(int) {}
  };

  // Neither start() nor the destructor may run on the loop's thread: they wait for it.
  static Result<std::shared_ptr<Membership>> start(std::shared_ptr<Engine> engine, Options options);
  // Becomes a rank of a running job, in place of a process that is out. Asks a member, connects to
  // all active ranks, and waits until they have agreed on a roster with this process. Returns the
  // membership, in which this process is that rank. Blocks until then, or the deadline passes, or
  // `stop` is set (kAborted). Not on the loop's thread. The engine must be new: its id names this
  // process's life as that rank.
  //
  // After an error the engine has left. kRefused: the members do not let this process in, for a
  // reason that does not change by waiting; the message names it (another job, version, mode, size or
  // options; the rank is out of range, or a living process holds it). kTimeout: no rank of that
  // number has become free in time, or members did not answer. kPeerLost: no member can be reached.
  // kInterrupted: members were lost meanwhile; the same with a new engine may succeed.
  static Result<std::shared_ptr<Membership>> join(std::shared_ptr<Engine> engine,
                                                  JoinOptions options, Deadline deadline,
                                                  const StopSignal* stop = nullptr);
  ~Membership();

  int rank() const { return options_.rank; }
  int size() const { return size_; }
  Engine& engine() const { return *engine_; }
  const std::shared_ptr<Engine>& sharedEngine() const { return engine_; }
  // Returns two message topics for a group of these ranks, equal on all of its members and
  // different from any other group's. Groups with the same name and ranks are counted, so members
  // must make the same groups in the same order. Any thread.
  Result<std::pair<uint64_t, uint64_t>> newTopics(const std::string& group,
                                                  const std::vector<int>& ranks);
  // The roster of the present term. Any thread.
  std::shared_ptr<const Roster> roster() const {
    Lock lock(mutex_);
    return roster_;
  }
  // By global rank in the present roster: see Roster::peers. Any thread.
  std::shared_ptr<Peer> peer(int rank) const { return roster()->peer(rank); }

  // Adds a listener. Earlier events are announced at once, on the loop's thread. On return the
  // listener misses nothing: if data sent after that is lost with a connection, onReconnected()
  // follows. Not on the loop's thread. `roster`: the one that the listener was made with, whose
  // ranks it means; null: always the present one.
  // `always`: it hears of the present view also if that is the first one, of all ranks.
  void subscribe(Listener* listener, std::shared_ptr<const Roster> roster = nullptr,
                 bool always = false);
  // Returns when the listener is not called any more. Not on the loop's thread.
  void unsubscribe(Listener* listener) {
    runOnLoop([this, listener] {
      std::erase_if(listeners_, [&](const Subscription& one) { return one.listener == listener; });
    });
  }

  // Called before the goodbye: from then on a view without us ends nothing here. Any thread.
  void leave() { hasLeft_.store(true, std::memory_order_release); }

  // Until then goodbyes of other ranks are collected, and judged together. A rank that leaves calls
  // it: as the other ranks leave, too, no rank needs its reports of their goodbyes. Any thread.
  void holdGoodbyes(Clock::time_point until) {
    engine_->loop().post(
        [this, until] { goodbyesHeldUntil_ = std::max(goodbyesHeldUntil_, until); });
  }

  View view() const {  // any thread
    Lock lock(mutex_);
    return view_;
  }
  // The ranks of `roster` that are in the view, held by the same process as there. The epoch is the
  // view's. Any thread.
  View viewOf(const Roster& roster) const {
    Lock lock(mutex_);
    return viewFor(roster);
  }
  Status standing() const {  // ok, or the error of onOver()
    Lock lock(mutex_);
    return standing_;
  }
  // True if standing() is an error. True before any group hears of it, so a caller that heard of it
  // from one group is refused by every other. Any thread; costs one load.
  bool isOver() const { return isOver_.load(std::memory_order_acquire); }

  // This rank's knowledge about a rank that is out. `detail` is set if this rank saw it itself.
  struct Seen {
    Accusation accusation;
    std::string detail;
    std::chrono::system_clock::time_point when;  // when this rank learned it
    Clock::time_point since;  // until then the rank was there, as far as this rank knows
  };
  // Of the ranks of the present roster that are out. With a roster: of its ranks, also if they have
  // been replaced since.
  std::vector<Seen> seen() const { return seen(*roster()); }
  std::vector<Seen> seen(const Roster& roster) const;
  // The accusations among seen(): all but the goodbyes.
  std::vector<Accusation> accusations() const;
  // True unless the rank destroyed the job before it went. An operation that misses a rank that did
  // not has lost it.
  bool isLost(const Roster& roster, int rank) const {
    Lock lock(mutex_);
    const Seen* seen = seenOf(roster, rank);
    return !seen || seen->accusation.cause != Cause::kLeft;
  }
  // An operation has gone on without these ranks of the roster. If the program of one just ended,
  // this is the first sign that it is a loss, so it is logged.
  void missed(const Roster& roster, const JobRanks& ranks);
  // Notes that an operation called at `called` could not go on before now because these ranks of
  // the roster are gone. Any thread but the loop's, because it may write to a file.
  void heldUp(const Roster& roster, const JobRanks& ranks, Clock::time_point called) const;

 private:
  friend class Admission;
  friend class Candidacy;

  // `isCandidate`: this process asks for its rank.
  Membership(std::shared_ptr<Engine> engine, Options options, std::shared_ptr<const Roster> roster,
             bool isCandidate);
  void open();
  void serveJoins();
  // A candidate that no member has added yet may start again. Then it takes no more reports.
  bool stopUnlessJoined() {
    bool isStopped = false;
    runOnLoop([&] { isStopped = isStopped_ = !agreement_.takesPart(); });
    return isStopped;
  }

  // ---- all on the loop's thread
  void onEvidence(const std::vector<EngineId>& peers, const Evidence& evidence);
  bool holdGoodbye(const std::vector<EngineId>& peers, const Evidence& evidence);
  void takeGoodbyes();
  void judge(const std::vector<EngineId>& peers, const Evidence& evidence);
  void onReconnected(const EngineId& id);
  void onExited(int number, const EngineId& id);
  void onLeft(int number, const EngineId& id, Cause cause);
  void onFailed(int number, const EngineId& id);
  bool readLastReport(int number, const EngineId& id);
  void onMessage(const EngineId& from, ByteView message);
  JobRanks knownOut() const;
  void takeHeld();
  void act(const ViewActions& actions);
  void publish();
  void note(const Accusation& accusation) EXCLUDES(mutex_);
  void fence(const JobRanks& out, const Roster& roster);
  void commit(const View& view) EXCLUDES(mutex_);
  void enter(const ViewActions::NextTerm& next) EXCLUDES(mutex_);
  void end(const Error& why) EXCLUDES(mutex_);
  Error evictedBy(const ViewActions::Eviction& eviction) const;
  Error inMinority() const EXCLUDES(mutex_);
  void sendReports();
  void armTimer();
  std::string describe(const JobRanks& ranks) const EXCLUDES(mutex_);
  std::string reasonOf(int rank) const REQUIRES(mutex_);
  void runOnLoop(std::function<void()> task);
  const Seen* seenOf(const Roster& roster, int rank) const REQUIRES(mutex_);
  View viewFor(const Roster& roster) const REQUIRES(mutex_);
  std::optional<int> numberOf(const EngineId& id) const;
  void addPeer(int rank, const std::shared_ptr<Peer>& peer) EXCLUDES(mutex_);

  const std::shared_ptr<Engine> engine_;
  const Options options_;  // without the peers
  const int size_;

  // Used on the loop's thread only.
  std::map<EngineId, int> ranks_;  // of the present roster
  ViewAgreement agreement_;
  HeldReports held_;
  Admission admission_;
  struct Subscription {
    Listener* listener;
    std::shared_ptr<const Roster> roster;  // null: the present one
  };
  std::vector<Subscription> listeners_;
  std::map<EngineId, Evidence> evidence_;                             // our own
  std::vector<std::pair<std::vector<EngineId>, Evidence>> goodbyes_;  // not judged yet
  Clock::time_point goodbyesHeldUntil_{};
  Clock::duration goodbyePause_{};
  Bytes published_;
  std::set<EngineId> sendTo_;                    // processes to which the report is due
  std::vector<std::shared_ptr<Peer>> toForget_;  // once the report has been sent
  bool isSending_ = false;
  bool isStopped_ = false;
  bool servesJoins_ = false;
  EventLoop::TimerId timer_ = 0;
  std::optional<Clock::time_point> timerAt_;

  std::atomic<bool> hasLeft_{false};
  std::atomic<bool> isOver_{false};  // set after standing_
  mutable Mutex mutex_;
  std::map<std::string, uint64_t> groupsMade_ GUARDED_BY(mutex_);
  std::shared_ptr<const Roster> roster_ GUARDED_BY(mutex_);
  View view_ GUARDED_BY(mutex_);
  Status standing_ GUARDED_BY(mutex_);
  std::map<EngineId, Seen> seen_ GUARDED_BY(mutex_);
  std::set<EngineId> missed_ GUARDED_BY(mutex_);
};

// By rank, Engine::endpoint() of the active ranks. Empty: the rank is out, or its address has not come
// yet. Any thread.
std::vector<Bytes> endpointsOf(const Membership& job);

}  // namespace mooncake
