#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "engine/engine.h"
#include "membership/held_reports.h"
#include "membership/view_agreement.h"

namespace mooncake {

// The topic (engine/peers/message_router.h) of the reports.
inline constexpr uint64_t kMembershipTopic = 1;

// Drives ViewAgreement: feeds it the evidence and the reports of peers; sends, logs and announces
// its results. One per engine, shared by all groups of the job.
class Membership {
 public:
  struct Options {
    int rank = 0;                              // global rank of this process
    std::vector<std::shared_ptr<Peer>> peers;  // by global rank; null for this one
    std::chrono::milliseconds failureTimeout{3000};
    std::string waitsFile;  // see noteWaits()
  };

  // A group. Called on the engine's loop thread, one call at a time; must not block.
  class Listener {
   public:
    virtual ~Listener() = default;
    // A later view was committed. Excluded ranks are fenced before this call: nothing that they
    // send or fetch has any effect here (Channel::fence).
    virtual void onView(const View& view) = 0;
    // This rank is out for good (kEvicted), or on the smaller side of a partition (kMinority).
    // Afterwards the driver says goodbye for this engine: its channels close.
    virtual void onOver(const Error& why) = 0;
    // The connection to this rank was made again: data put or sent either way may be lost.
    virtual void onReconnected(int) {}
  };

  // Neither start() nor the destructor may run on the loop's thread: they wait for it.
  static Result<std::shared_ptr<Membership>> start(std::shared_ptr<Engine> engine, Options options);
  ~Membership();

  int rank() const { return options_.rank; }
  int size() const { return static_cast<int>(options_.peers.size()); }
  Engine& engine() const { return *engine_; }
  const std::shared_ptr<Engine>& sharedEngine() const { return engine_; }
  // Returns two message topics for a group of these ranks, equal on all of its members and
  // different from any other group's. Groups with the same name and ranks are counted, so members
  // must make the same groups in the same order. Any thread.
  Result<std::pair<uint64_t, uint64_t>> newTopics(const std::string& group,
                                                  const std::vector<int>& ranks);
  // By global rank; null for this one.
  const std::shared_ptr<Peer>& peer(int rank) const { return options_.peers[size_t(rank)]; }

  // Adds a listener. Earlier events are announced at once, on the loop's thread. On return the
  // listener misses nothing: if data sent after that is lost with a connection, onReconnected()
  // follows. Not on the loop's thread.
  void subscribe(Listener* listener);
  // Returns when the listener is not called any more. Not on the loop's thread.
  void unsubscribe(Listener* listener);

  // Called before the goodbye: from then on a view without us ends nothing here. Any thread.
  void leave() { hasLeft_.store(true, std::memory_order_release); }

  // Until then goodbyes of other ranks are collected, and judged together. A rank that leaves calls
  // it: as the other ranks leave, too, no rank needs its reports of their goodbyes. Any thread.
  void holdGoodbyes(Clock::time_point until);

  View view() const;        // any thread
  Status standing() const;  // ok, or the error of onOver()
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
  std::vector<Seen> seen() const;
  // The accusations among seen(): all but the goodbyes.
  std::vector<Accusation> accusations() const;
  // True unless the rank destroyed the job before it went. An operation that misses a rank that did
  // not has lost it.
  bool isLost(int rank) const;
  // An operation has gone on without these ranks. If the program of one just ended, this is the
  // first sign that it is a loss, so it is logged.
  void missed(const JobRanks& ranks);
  // Notes that an operation called at `called` could not go on before now because these ranks are
  // gone. Any thread but the loop's, because it may write to a file.
  void heldUp(const JobRanks& ranks, Clock::time_point called) const;

 private:
  Membership(std::shared_ptr<Engine> engine, Options options);

  // ---- all on the loop's thread
  void onEvidence(const std::vector<EngineId>& peers, const Evidence& evidence);
  bool holdGoodbye(const JobRanks& ranks, const Evidence& evidence);
  void takeGoodbyes();
  void judge(const JobRanks& ranks, const Evidence& evidence);
  void onReconnected(const EngineId& id);
  void onExited(int rank);
  void onLeft(int rank, Cause cause);
  void onFailed(int rank);
  bool readLastReport(int rank);
  void onMessage(const EngineId& from, ByteView message);
  JobRanks knownOut() const;
  void takeHeld();
  void act(const ViewActions& actions);
  void publish();
  void note(const Accusation& accusation) EXCLUDES(mutex_);
  void commit(const View& view) EXCLUDES(mutex_);
  void end(const Error& why) EXCLUDES(mutex_);
  Error evictedBy(const ViewActions::Eviction& eviction) const;
  Error inMinority() const EXCLUDES(mutex_);
  void sendReports();
  void armTimer();
  std::string describe(const JobRanks& ranks) const;
  std::string reasonOf(int rank) const;
  void runOnLoop(std::function<void()> task);

  const std::shared_ptr<Engine> engine_;
  const Options options_;
  std::map<EngineId, int> ranks_;

  // Used on the loop's thread only.
  ViewAgreement agreement_;
  HeldReports held_;
  std::vector<Listener*> listeners_;
  std::map<int, Evidence> evidence_;                     // our own evidence, by rank
  std::vector<std::pair<JobRanks, Evidence>> goodbyes_;  // not judged yet
  Clock::time_point goodbyesHeldUntil_{};
  Clock::duration goodbyePause_{};
  Bytes published_;
  JobRanks sendTo_;  // ranks to which the report is due
  bool isSending_ = false;
  bool isStopped_ = false;
  EventLoop::TimerId timer_ = 0;
  std::optional<Clock::time_point> timerAt_;

  std::atomic<bool> hasLeft_{false};
  std::atomic<bool> isOver_{false};  // set after standing_
  mutable Mutex mutex_;
  std::map<std::string, uint64_t> groupsMade_ GUARDED_BY(mutex_);
  View view_ GUARDED_BY(mutex_);
  Status standing_ GUARDED_BY(mutex_);
  std::map<int, Seen> seen_ GUARDED_BY(mutex_);
  JobRanks missed_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
