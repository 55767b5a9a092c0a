#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/backoff.h"
#include "base/mutex.h"
#include "group/group.h"
#include "group/line_members.h"
#include "group/line_words.h"
#include "group/series_events.h"
#include "group/successor_maker.h"

namespace mooncake {

// A group over time: its series, one Group after the other. All have its name, its size and this
// rank's number. A series follows another one when a newcomer takes the place of a lost rank: the
// newcomer says that it is ready, a member wishes to have it, the lowest member proposes a successor,
// all members and the newcomer make that Group in the background, and a flush of the old one decides
// where it ends (Renewal, and section 9 of docs/membership.md).
//
// Whoever runs the group's operations calls moveOn() between two of them; nobody else changes
// current().
class GroupLine {
 public:
  struct Options {
    std::shared_ptr<Membership> job;
    GroupOptions group;       // of each series; its `jobRanks` are set
    std::string identity;     // the same on all members, and of no other line of the job
    bool isNewcomer = false;  // the first series has this rank alone, until join()
    // Called on the line's thread when a move is due: the owner calls moveOn() as soon as no
    // operation runs.
    std::function<void()> onDue;
    // Called by moveOn(), while current() is still the group before.
    // `stays[r]`: rank r is the same process in both.
    std::function<void(Group& to, const std::vector<bool>& stays)> onMove;
  };

  // `events`: of `first`.
  GroupLine(std::unique_ptr<Group> first, std::shared_ptr<SeriesEvents> events, Options options);
  ~GroupLine();
  GroupLine(const GroupLine&) = delete;
  GroupLine& operator=(const GroupLine&) = delete;
  // Begins to hear of newcomers.
  Status start();
  // Waits until old series have ended on all members, and nothing is being made.
  bool settle(Deadline deadline) EXCLUDES(mutex_);
  // Ends the thread. The line does not move any more.
  void stop() EXCLUDES(mutex_);

  // The series in which calls run now; never null. Any thread.
  std::shared_ptr<Group> current() const EXCLUDES(mutex_);
  // How many series this rank has been in.
  uint32_t series() const EXCLUDES(mutex_);
  // Whether this rank is a newcomer that the members have not let in yet.
  bool isNewcomer() const EXCLUDES(mutex_);
  // Whether a newcomer waits to take the place of this rank, which is lost.
  bool isReady(int rank) const EXCLUDES(mutex_);

  // Members: lets newcomers in for these ranks, and waits until the line has moved, or until it is
  // decided that it moves behind a call that other members are in and this rank has not begun. The
  // caller's own earlier calls have ended. Ranks that are in are skipped. Returns the ranks among
  // them for which a newcomer was ready and is lost again, or comes later. kTimeout: names the ranks for which none is ready by
  // `ready`, or the members that have not come by `deadline`; nothing has changed.
  enum class Unready { kIsError, kIsDropped };  // a rank for which no newcomer is ready
  Result<std::vector<int>> recover(std::vector<int> ranks, Deadline ready, Deadline deadline,
                                   Unready unready = Unready::kIsError) EXCLUDES(mutex_);
  // Newcomers: waits until the members have let this rank in. Members return at once.
  Status join(Deadline deadline) EXCLUDES(mutex_);

  // For the thread that runs the operations, when an operation has answered kMoved, or at onDue:
  // goes on to the next series if the current one has ended. Returns the series to run in.
  std::shared_ptr<Group> moveOn() EXCLUDES(mutex_);

 private:
  // A successor that is being made, or is made.
  struct Preparation {
    Successor successor;
    std::shared_ptr<SuccessorMaker> maker;
    std::shared_ptr<Group> group;  // once it is made
    Status failure;
    bool isGivenUp = false;             // by this rank, or by another member
    bool isWished = false;              // move to it once it is made
    std::set<int> movedTo;              // newcomer: members that are in it
    std::optional<Repetition> telling;  // on the rank that has proposed it
  };
  using Preparations = std::map<uint64_t, Preparation>;  // by digest

  void onMessage(const EngineId& from, ByteView bytes) EXCLUDES(mutex_);
  bool lastMoveHas(const Newcomer& newcomer) const EXCLUDES(mutex_);
  bool isNext(const Successor& successor) const REQUIRES(mutex_);
  bool isBehind(const Successor& successor) const EXCLUDES(mutex_);
  void tellLastMove(int rank) const EXCLUDES(mutex_);
  bool isVoid(const Preparation& one, const std::vector<bool>& active) const REQUIRES(mutex_);
  Preparations::iterator living(const std::vector<bool>& active) REQUIRES(mutex_);
  void propose(const std::vector<Newcomer>& newcomers) EXCLUDES(mutex_);
  void prepare(const Successor& successor, uint64_t digest) EXCLUDES(mutex_);
  void make(uint64_t digest, const StopSignal& stop) EXCLUDES(mutex_);
  void readyFor(Group& before, uint64_t digest) EXCLUDES(mutex_);
  void wishFor(uint64_t digest) EXCLUDES(mutex_);
  uint64_t wishForLiving(const Group& group, uint64_t before) EXCLUDES(mutex_);
  Status giveUp(Group& group, uint64_t digest) EXCLUDES(mutex_);
  void noteGivenUp(uint64_t digest) EXCLUDES(mutex_);
  void dropVoid() EXCLUDES(mutex_);
  void noteMoved(uint64_t digest, int rank) EXCLUDES(mutex_);
  void checkTold(uint64_t digest) EXCLUDES(mutex_);
  std::vector<Newcomer> newcomersFor(const std::vector<int>& ranks, std::vector<int>& missing) const
      REQUIRES(mutex_);
  bool dropLost(const Group& group, const std::vector<Newcomer>& asked, std::vector<int>& ranks,
                std::vector<int>& dropped) EXCLUDES(mutex_);
  bool isGivenUp(const Group& group, const Newcomer& newcomer) EXCLUDES(mutex_);
  std::vector<int> withoutNewcomers(const Group& group, std::vector<int> ranks,
                                    std::vector<int> dropped) const EXCLUDES(mutex_);
  Status failureOf(uint64_t digest) const EXCLUDES(mutex_);
  void end(const std::shared_ptr<Group>& old) EXCLUDES(mutex_);
  void post(std::function<void()> task) REQUIRES(mutex_);
  void run() EXCLUDES(mutex_);

  const Options options_;
  const std::shared_ptr<SeriesEvents> events_;
  LineMembers members_;

  Mutex readiness_;  // held while this rank says that it is ready, and while it takes that back
  mutable Mutex mutex_;
  Condition changed_;
  std::shared_ptr<Group> current_ GUARDED_BY(mutex_);
  uint32_t series_ GUARDED_BY(mutex_) = 1;
  bool isIn_ GUARDED_BY(mutex_);  // not a newcomer any more
  std::map<int, EngineId> ready_ GUARDED_BY(mutex_);
  Preparations preparations_ GUARDED_BY(mutex_);
  std::set<uint64_t> givenUp_ GUARDED_BY(mutex_);  // digests that are not made any more
  std::pair<uint64_t, Status> lastFailure_ GUARDED_BY(mutex_);  // of one that is dropped
  uint32_t proposals_ GUARDED_BY(mutex_) = 0;
  std::optional<uint64_t> due_ GUARDED_BY(mutex_);        // newcomer: where it moves
  std::optional<Successor> lastMove_ GUARDED_BY(mutex_);  // told again to newcomers that missed it
  std::deque<std::function<void()>> tasks_ GUARDED_BY(mutex_);
  bool isMoving_ GUARDED_BY(mutex_) = false;  // between two series
  bool isBusy_ GUARDED_BY(mutex_) = false;    // a task runs
  bool isStopped_ GUARDED_BY(mutex_) = false;
  std::thread thread_;  // for tasks; started by the first one
};

}  // namespace mooncake
