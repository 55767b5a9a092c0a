#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/backoff.h"
#include "base/mutex.h"
#include "group/group.h"
#include "group/line_members.h"
#include "group/line_tasks.h"
#include "group/line_words.h"
#include "group/ready_newcomers.h"
#include "group/series_events.h"
#include "group/successor_table.h"

namespace mooncake {

// A group over time: its series, one Group after the other. All have its name, its size and this
// rank's number. A series follows another one when a newcomer takes the place of a lost rank: the
// newcomer says that it is ready, a member wishes to have it, the lowest member proposes a successor,
// all members and the newcomer make that Group in the background, and a flush of the old one decides
// where it ends (Renewal, and section 9 of docs/membership.md). Members are taken out in the same way.
// Such a rank stays in the job, may come back as a newcomer, and its calls fail until then.
//
// Whoever runs the group's operations calls moveOn() between two of them; nobody else changes
// current().
class GroupLine {
 public:
  struct Options {
    GroupOptions group;    // of each series; its `jobRanks` are set, `extent` is of the first one
    std::string identity;  // the same on all members, and of no other line of the job
    bool isNewcomer = false;  // the first series has this rank alone, until join()
    bool keepsLost =
        false;  // ranks that are lost in a series are members until remove() or recover()
    // Called on the line's thread when a move is due: the owner calls moveOn() as soon as no
    // operation runs.
    std::function<void()> onDue;
    // Called by moveOn(), while current() is still the group before. `stays[r]`: rank r goes on with
    // this one in the other group. Newcomers, and ranks that are taken out, go on with none.
    std::function<void(Group& to, const std::vector<bool>& stays)> onMove;
    // Makes a group that has this rank alone, for a rank that is taken out.
    std::function<Result<std::unique_ptr<Group>>(GroupOptions options)> makeAlone;
  };

  // `events`: of `first`, a group of `job`.
  GroupLine(std::shared_ptr<Membership> job, std::unique_ptr<Group> first,
            std::shared_ptr<SeriesEvents> events, Options options);
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
  // Group::extent() of that series. One load.
  int extent() const { return extent_.load(std::memory_order_acquire); }
  // How many series this rank has been in.
  uint32_t series() const EXCLUDES(mutex_);
  // Whether this rank is not in the group: the members have not let it in yet, or have taken it out.
  bool isNewcomer() const EXCLUDES(mutex_);
  // Whether they have taken it out.
  bool isRemoved() const EXCLUDES(mutex_);
  // Names the newcomer that waits to take the place of this rank, which is lost. 0: there is none.
  uint64_t readyKey(int rank) const EXCLUDES(mutex_);

  // Members: lets newcomers in for these ranks, and waits until the line has moved, or until it is
  // decided that it moves behind a call that other members are in and this rank has not begun. The
  // caller's own earlier calls have ended. Ranks that are in are skipped. Returns the ranks among
  // them for which a newcomer was ready and is lost again, or comes later. kTimeout: names the ranks for which none is ready by
  // `ready`, or the members that have not come by `deadline`; nothing has changed.
  // With `keys`, by rank: only the newcomers that readyKey() named so. Another one that has come since
  // is dropped, so that members that agree on the keys go on at one place.
  enum class Unready { kIsError, kIsDropped };  // a rank for which no newcomer is ready
  Result<std::vector<int>> recover(std::vector<int> ranks, Deadline ready, Deadline deadline,
                                   Unready unready = Unready::kIsError,
                                   const std::map<int, uint64_t>& keys = {}) EXCLUDES(mutex_);
  // Members: takes these ranks out, this one, too, if it is among them, and waits as recover() does.
  // Ranks that are out are skipped. A rank that takes itself out takes part in no further call, also
  // if other members are in one.
  Status remove(std::vector<int> ranks, Deadline deadline) EXCLUDES(mutex_);
  // Newcomers: waits until the members have let this rank in. Members return at once.
  Status join(Deadline deadline) EXCLUDES(mutex_);

  // By rank of the group: ranks of the job. Roster::kNobody: none has come yet.
  int jobRank(int rank) const { return members_.jobRank(rank); }
  // The job of which this process is a member with this line.
  std::shared_ptr<Membership> job() const { return members_.job(); }
  // The job went on without this process, which has entered it again, as a member of `job`. This rank
  // is then as if the members had taken it out. One thread at a time.
  Status enterAgain(std::shared_ptr<Membership> job) EXCLUDES(mutex_);

  // For the thread that runs the operations, when an operation has answered kMoved, or at onDue:
  // goes on to the next series if the current one has ended. Returns the series to run in.
  std::shared_ptr<Group> moveOn() EXCLUDES(mutex_);

 private:
  // What a caller that waits for a change repeats.
  struct Asking {
    int proposer = -1;
    std::optional<Repetition> pause;
    uint64_t wished = 0;  // digest of the successor
  };

  void listen();
  void onMessage(const EngineId& from, ByteView bytes) EXCLUDES(mutex_);
  bool lastMoveHas(const Newcomer& newcomer) const EXCLUDES(mutex_);
  bool isNext(const Successor& successor) const REQUIRES(mutex_);
  bool isBehind(const Successor& successor) const EXCLUDES(mutex_);
  void tellLastMove(int rank) const EXCLUDES(mutex_);
  void propose(const Successor& wanted) EXCLUDES(mutex_);
  void prepare(const Successor& successor, uint64_t digest) EXCLUDES(mutex_);
  void make(uint64_t digest, const StopSignal& stop) EXCLUDES(mutex_);
  Result<std::unique_ptr<Group>> makeGroup(const Successor& successor, const Group& before,
                                           const StopSignal& stop);
  void readyFor(Group& before, uint64_t digest) EXCLUDES(mutex_);
  void wishFor(uint64_t digest) EXCLUDES(mutex_);
  uint64_t wishForLiving(const Group& group, uint64_t before) EXCLUDES(mutex_);
  Status giveUp(Group& group, uint64_t digest) EXCLUDES(mutex_);
  void noteGivenUp(uint64_t digest) EXCLUDES(mutex_);
  void dropVoid() EXCLUDES(mutex_);
  void noteMoved(uint64_t digest, int rank) EXCLUDES(mutex_);
  void checkTold(uint64_t digest) EXCLUDES(mutex_);
  Status ask(const std::shared_ptr<Group>& group, const Successor& wanted, Asking& asking,
             Deadline deadline) EXCLUDES(mutex_);
  bool dropLost(const Group& group, const std::vector<Newcomer>& asked, std::vector<int>& ranks,
                std::vector<int>& dropped) EXCLUDES(mutex_);
  bool isGivenUp(const Group& group, const Newcomer& newcomer) EXCLUDES(mutex_);
  std::vector<int> withoutNewcomers(const Group& group, std::vector<int> ranks,
                                    std::vector<int> dropped) const EXCLUDES(mutex_);
  Status goesWithout(const Group& group, const std::vector<int>& ranks) const EXCLUDES(mutex_);
  bool leavesEarly(Group& from) EXCLUDES(mutex_);
  std::shared_ptr<Group> takeNext(Group& from, Successor& successor) EXCLUDES(mutex_);
  void end(const std::shared_ptr<Group>& old) EXCLUDES(mutex_);
  void post(std::function<void()> task) REQUIRES(mutex_);

  const Options options_;
  const std::shared_ptr<SeriesEvents> events_;
  LineMembers members_;

  Mutex readiness_;  // held while this rank says that it is ready, and while it takes that back
  mutable Mutex mutex_;
  Condition changed_;
  std::shared_ptr<Group> current_ GUARDED_BY(mutex_);
  std::atomic<int> extent_;
  uint32_t series_ GUARDED_BY(mutex_) = 1;
  bool isIn_ GUARDED_BY(mutex_);               // not a newcomer any more
  bool isRemoved_ GUARDED_BY(mutex_) = false;  // taken out by the members
  bool isJoining_ GUARDED_BY(mutex_) = false;  // the newcomer has asked to be let in
  // This rank takes itself out, and begins no call any more that lies before the close.
  bool isLeaving_ GUARDED_BY(mutex_) = false;
  ReadyNewcomers ready_ GUARDED_BY(mutex_);
  SuccessorTable successors_ GUARDED_BY(mutex_);
  uint32_t proposals_ GUARDED_BY(mutex_) = 0;
  std::optional<uint64_t> due_ GUARDED_BY(mutex_);     // newcomer: where it moves
  std::shared_ptr<Group> outside_ GUARDED_BY(mutex_);  // where a rank moves that has entered again
  std::optional<Successor> lastMove_ GUARDED_BY(mutex_);  // told again to newcomers that missed it
  std::vector<int> retired_ GUARDED_BY(mutex_);  // Successor::retired of the present series
  bool isMoving_ GUARDED_BY(mutex_) = false;     // between two series
  bool isStopped_ GUARDED_BY(mutex_) = false;
  LineTasks tasks_;
};

}  // namespace mooncake
