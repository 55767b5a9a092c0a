#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "engine/engine.h"
#include "membership/held_reports.h"
#include "membership/view_agreement.h"

namespace mooncake {

// The topic (engine/message_router.h) through which reports go.
inline constexpr uint64_t kMembershipTopic = 1;

// The driver of ViewAgreement: what this engine sees of its peers goes in, what comes out is sent,
// logged and told to those who listen. One per engine, shared by all groups of the job.
class Membership {
 public:
  struct Options {
    int rank = 0;                              // ours, in the job
    std::vector<std::shared_ptr<Peer>> peers;  // of every rank of the job; null: this one
    std::chrono::milliseconds failureTimeout{3000};
    std::string waitsFile;  // see noteWaits()
  };

  // A group. Called on the engine's loop thread, one call at a time; must not block.
  class Listener {
   public:
    virtual ~Listener() = default;
    // A later view was committed. Before this call nothing that an excluded rank sends or fetches
    // has any effect here any more (Channel::fence).
    virtual void onView(const View& view) = 0;
    // This rank is out, for good (kEvicted), or on the smaller side of a partition (kMinority).
    // Afterwards the driver says goodbye for this engine: its channels close.
    virtual void onOver(const Error& why) = 0;
    // The connection to this rank broke and was made again: what we had put or sent there may be
    // lost, and what it had sent here.
    virtual void onReconnected(int) {}
  };

  // Neither this nor the destructor on the loop's thread: they wait for it.
  static Result<std::shared_ptr<Membership>> start(std::shared_ptr<Engine> engine, Options options);
  ~Membership();

  int rank() const { return options_.rank; }
  int size() const { return static_cast<int>(options_.peers.size()); }
  Engine& engine() const { return *engine_; }
  const std::shared_ptr<Engine>& sharedEngine() const { return engine_; }
  // Two topics of messages for a group of these ranks: the same on all of its members, and no other
  // group's. Names and ranks may come again, so they are counted: members make the same groups in
  // the same order. Any thread.
  Result<std::pair<uint64_t, uint64_t>> newTopics(const std::string& group,
                                                  const std::vector<int>& ranks);
  // By rank of the job; null for this one.
  const std::shared_ptr<Peer>& peer(int rank) const { return options_.peers[size_t(rank)]; }

  // If anything has happened before, it is told at once (on the loop's thread). Returns when
  // nothing is missed any more: what is sent after it, and lost with a connection, is made good
  // for. Not on the loop's thread.
  void subscribe(Listener* listener);
  // The listener is not called any more when this returns. Not on the loop's thread.
  void unsubscribe(Listener* listener);

  // We are about to say goodbye: that the others go on without us is no news from now on, and ends
  // nothing here. Any thread.
  void leave() { hasLeft_.store(true, std::memory_order_release); }

  View view() const;        // any thread
  Status standing() const;  // ok, or the error of onOver()
  // Whether standing() is an error. From before any group is told, so that who has heard it from
  // one group is not served by another any more. Any thread; costs a load.
  bool isOver() const { return isOver_.load(std::memory_order_acquire); }

  // Of all that are out, as far as this rank knows: how, by whom, and what was seen if it was us.
  struct Seen {
    Accusation accusation;
    std::string detail;
    std::chrono::system_clock::time_point when;  // that this rank learned it
    Clock::time_point since;  // as far as this rank knows it was there until then
  };
  std::vector<Seen> seen() const;
  // Of these the accusations: a goodbye is none.
  std::vector<Accusation> accusations() const;
  // The rank is out, and destroyed nothing before: an operation that misses it has lost it.
  bool isLost(int rank) const;
  // An operation has gone on without these. Of who came to the end of its program that is the first
  // sign of a loss.
  void missed(const RankSet& ranks);
  // What was called then could not go on before now, since these are gone. Any thread but the
  // loop's, as it may write to a file.
  void heldUp(const RankSet& ranks, Clock::time_point called) const;

 private:
  Membership(std::shared_ptr<Engine> engine, Options options);

  // ---- all on the loop's thread
  void onEvidence(const std::vector<EngineId>& peers, const Evidence& evidence);
  void judge(const RankSet& ranks, const Evidence& evidence);
  void onReconnected(const EngineId& id);
  void onExited(int rank);
  void onLeft(int rank, Cause cause);
  void onFailed(int rank);
  bool readLastReport(int rank);
  void onMessage(const EngineId& from, ByteView message);
  RankSet knownOut() const;
  void takeHeld();
  void act(const ViewActions& actions);
  void publish();
  void note(const Accusation& accusation);
  void commit(const View& view);
  void end(const Error& why);
  Error evictedBy(const ViewActions::Eviction& eviction) const;
  Error inMinority() const;
  void sendReports();
  void armTimer();
  std::string describe(const RankSet& ranks) const;
  std::string reasonOf(int rank) const;
  void runOnLoop(std::function<void()> task);

  const std::shared_ptr<Engine> engine_;
  const Options options_;
  std::map<EngineId, int> ranks_;

  // Of the loop's thread.
  ViewAgreement agreement_;
  HeldReports held_;
  std::vector<Listener*> listeners_;
  std::map<int, Evidence> evidence_;  // what we saw ourselves, by rank
  Bytes published_;
  RankSet sendTo_;  // the report is due
  bool isSending_ = false;
  bool isStopped_ = false;
  EventLoop::TimerId timer_ = 0;
  std::optional<Clock::time_point> timerAt_;

  std::atomic<bool> hasLeft_{false};
  std::atomic<bool> isOver_{false};  // set behind standing_
  mutable std::mutex mutex_;         // guards all below
  std::map<std::string, uint64_t> groupsMade_;
  View view_;
  Status standing_;
  std::map<int, Seen> seen_;
  RankSet missed_;
};

}  // namespace mooncake
