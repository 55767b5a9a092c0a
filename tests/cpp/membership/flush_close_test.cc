// The end of a group's series, seen from its members, without threads. Each rule of "The close of a
// series" in docs/membership.md has a test that fails without the rule.
#include <algorithm>
#include <deque>
#include <gtest/gtest.h>
#include <map>
#include <optional>
#include <random>
#include <vector>

#include "membership/flush_machine.h"

namespace mooncake {
namespace {

using AbortReason = FlushReport::AbortReason;
using Kind = FlushMessage::Kind;

constexpr Clock::time_point kStart{};
constexpr auto kResend = std::chrono::milliseconds(50);
constexpr uint64_t kNext = 77, kOther = 99;  // successors

// Machines of all members. Messages wait until the test delivers them; those of one rank to another
// arrive in order.
class Members {
 public:
  explicit Members(int size, bool raises = false) : size_(size) {
    for (int r = 0; r < size; ++r) {
      ranks.emplace_back(FlushMachine::Options{.group = "test",
                                               .rank = r,
                                               .size = size,
                                               .raises = raises,
                                               .mostRounds = 100,
                                               .resend = kResend});
    }
  }

  FlushMachine& operator[](int rank) { return ranks[size_t(rank)]; }

  // Carries out actions, and the duties of the driver: a caller that is in no operation stops at
  // once.
  void take(int rank, const FlushActions& actions) {
    for (const auto& action : actions) {
      const auto* tell = std::get_if<FlushAction::Tell>(&action);
      if (!tell) continue;
      for (const int to : tell->to) letters.push_back({rank, to, tell->message});
    }
    FlushMachine& machine = (*this)[rank];
    if (isBusy(rank)) return;
    if (machine.wantsReport()) return take(rank, machine.stopped());
    if (machine.wantsToMove()) take(rank, machine.move(now));
  }
  void ready(int rank, uint64_t successor) {
    auto actions = (*this)[rank].readyFor(successor);
    ASSERT_TRUE(actions);
    take(rank, *actions);
  }
  void allReady(uint64_t successor) {
    for (int r = 0; r < size_; ++r) ready(r, successor);
  }
  void wish(int rank, uint64_t successor) {
    (*this)[rank].wishesFor(successor, now);
    take(rank, {});
  }
  // The caller begins an operation, and is in it until it parks.
  void begin(int rank, uint64_t number) {
    (*this)[rank].begins(number);
    busy.push_back(rank);
  }
  void park(int rank, uint64_t number, AbortReason abort = AbortReason::kNone, Error why = {}) {
    std::erase(busy, rank);
    take(rank, (*this)[rank].parked(number, abort, std::move(why), now));
  }
  void end(int rank, uint64_t number) {
    std::erase(busy, rank);
    (*this)[rank].hasEnded(number);
    take(rank, {});
  }
  void view(int rank, std::vector<int> active) {
    FlushView view{.epoch = uint64_t(1 + size_) - active.size(), .active = std::move(active)};
    for (int r = 0; r < size_; ++r) {
      if (!std::ranges::binary_search(view.active, r)) view.losses.push_back({r, "it died"});
    }
    take(rank, (*this)[rank].viewed(view, now));
  }
  void leave(int rank) { take(rank, (*this)[rank].leave()); }

  // Delivers the next message of this way, or returns false.
  bool deliverOne(int from, int to) {
    const auto found = std::ranges::find_if(
        letters, [&](const Letter& one) { return one.from == from && one.to == to; });
    if (found == letters.end()) return false;
    const auto message = decodeFlushMessage(encodeFlushMessage(found->message), size_);
    letters.erase(found);
    EXPECT_TRUE(message.ok());
    take(to, (*this)[to].received(from, *message, now));
    return true;
  }
  void deliver(int from, int to) {
    while (deliverOne(from, to)) continue;
  }
  void deliverAll() {
    while (!letters.empty()) deliverOne(letters.front().from, letters.front().to);
  }
  // What is under way from and to a dead rank is lost.
  void die(int rank) {
    std::erase_if(letters, [&](const Letter& one) { return one.from == rank || one.to == rank; });
  }
  bool isBusy(int rank) const { return std::ranges::find(busy, rank) != busy.end(); }

  struct Letter {
    int from, to;
    FlushMessage message;
  };
  std::vector<FlushMachine> ranks;
  std::deque<Letter> letters;
  std::vector<int> busy;
  Clock::time_point now = kStart;

 private:
  const int size_;
};

SeriesClose behind(uint64_t number, uint64_t successor = kNext) { return {successor, number}; }

TEST(FlushClose, AWishClosesAnIdleSeriesOnceAllAreReady) {
  Members members(3);
  members.ready(0, kNext);
  members.ready(1, kNext);
  members.wish(0, kNext);
  members.deliverAll();
  EXPECT_FALSE(members[0].isFrozen()) << "rank 2 is not ready";
  EXPECT_EQ(members[0].unready(kNext), std::vector{2});
  members.ready(2, kNext);
  members.deliverAll();
  for (int r = 0; r < 3; ++r) {
    EXPECT_EQ(members[r].close(), behind(0)) << r;
    EXPECT_FALSE(members[r].isFrozen());
    EXPECT_EQ(members[r].ended(), 0u);
  }
  EXPECT_EQ(members[0].wish(), 0u);
  EXPECT_FALSE(members[0].nextTick());
}

TEST(FlushClose, WithoutAWishNothingCloses) {
  Members members(2);
  members.allReady(kNext);
  members.deliverAll();
  members.begin(0, 1);
  members.park(0, 1);
  members.deliverAll();
  EXPECT_EQ(members[0].attempt(), (Attempt{0, 1}));
  EXPECT_FALSE(members[0].close());
}

// [mut-move-own] One member is behind, and closes where all do.
TEST(FlushClose, ThePlaceFollowsFromAllReports) {
  Members members(3);
  members.allReady(kNext);
  members.deliverAll();
  for (int r = 0; r < 3; ++r) members.begin(r, 1);
  for (const int r : {0, 1}) members.end(r, 1);
  members.wish(0, kNext);
  members.deliverAll();
  members.park(2, 1);
  members.deliverAll();
  EXPECT_EQ(members[2].toTake(), 1u);
  for (int r = 0; r < 3; ++r) EXPECT_EQ(members[r].close(), behind(1)) << r;
}

// [mut-move-begun] A call that has published something runs to its end in this series.
TEST(FlushClose, AnOperationThatOneHasBegunIsBeforeTheClose) {
  Members members(2);
  members.allReady(kNext);
  members.deliverAll();
  members.begin(1, 1);
  members.wish(0, kNext);
  members.deliverAll();
  members.park(1, 1);
  members.deliverAll();
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(members[r].ended(), 0u) << "it starts again";
    EXPECT_EQ(members[r].close(), behind(1));
  }
}

TEST(FlushClose, AnOperationThatEndsWithAnErrorIsBeforeTheClose) {
  Members members(2);
  members.allReady(kNext);
  members.deliverAll();
  members.begin(1, 1);
  members.wish(0, kNext);
  members.deliver(0, 1);
  members.park(1, 1, AbortReason::kTimeout, {ErrorCode::kTimeout, "too late"});
  members.deliverAll();
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(members[r].ended(), 1u);
    EXPECT_EQ(members[r].close(), behind(1));
  }
}

// In mode `raise` the loss of a rank ends one operation on all, also one that no rank has begun.
TEST(FlushClose, ALossInModeRaiseIsBeforeTheClose) {
  Members members(3, true);
  members.allReady(kNext);
  members.wish(0, kNext);
  members.deliver(0, 1);
  members.deliver(1, 0);
  members.die(2);
  for (const int r : {0, 1}) members.view(r, {0, 1});
  members.deliverAll();
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(members[r].howEnded(1).code, ErrorCode::kPeerLost);
    EXPECT_EQ(members[r].close(), behind(1));
  }
}

// [mut-move-forgotten] The decision of the others was dropped for a view.
TEST(FlushClose, ACloseThatOneHasActedOnStands) {
  for (const bool isActorDead : {false, true}) {
    Members members(4);
    members.allReady(kNext);
    members.deliverAll();
    members.wish(0, kNext);
    for (int to = 1; to < 4; ++to) members.deliver(0, to);
    for (int from = 1; from < 4; ++from) members.deliver(from, 0);
    ASSERT_EQ(members[0].close(), behind(0));
    ASSERT_FALSE(members[1].close());

    members.die(isActorDead ? 0 : 3);
    const std::vector<int> rest = isActorDead ? std::vector{1, 2, 3} : std::vector{0, 1, 2};
    // Another place would be decided now, if the old one was forgotten.
    members.begin(1, 1);
    for (const int r : rest) members.view(r, rest);
    members.park(1, 1);
    members.deliverAll();
    for (const int r : rest) {
      ASSERT_FALSE(members[r].isFrozen());
      // The dead rank had the wish.
      EXPECT_EQ(members[r].close(), isActorDead ? std::nullopt : std::optional(behind(0))) << r;
    }
  }
}

// The one that acted on the close is dead, and nothing was begun behind it: another place is as
// good.
TEST(FlushClose, AnotherMembersWishClosesWhereTheActorIsDead) {
  Members members(3);
  members.allReady(kNext);
  members.deliverAll();
  members.wish(0, kNext);
  for (const int to : {1, 2}) members.deliver(0, to);
  members.deliver(1, 0);
  members.deliver(2, 0);
  ASSERT_TRUE(members[0].close());
  members.die(0);
  members.wish(1, kNext);
  for (const int r : {1, 2}) members.view(r, {1, 2});
  members.deliverAll();
  for (const int r : {1, 2}) EXPECT_EQ(members[r].close(), behind(0));
}

// [mut-move-left] A member that has closed has left before the others decide.
TEST(FlushClose, ALeaveReportCarriesTheClose) {
  Members members(3);
  members.allReady(kNext);
  members.deliverAll();
  members.wish(0, kNext);
  for (const int to : {1, 2}) members.deliver(0, to);
  for (const int from : {1, 2}) members.deliver(from, 0);
  ASSERT_TRUE(members[0].close());
  members.letters.clear();  // the reports of ranks 1 and 2 to each other
  members.leave(0);
  // Rank 1 makes another round, to which the leaver has no report.
  members.take(1, members[1].reconnected(2, false, kStart));
  members.deliverAll();
  for (const int r : {1, 2}) {
    ASSERT_FALSE(members[r].isFrozen());
    EXPECT_EQ(members[r].close(), behind(0)) << r;
  }
}

// The view is without the leaver before its close was decided here: no decision asks for it.
TEST(FlushClose, ALeaversCloseBindsAlsoBehindAView) {
  Members members(3);
  members.allReady(kNext);
  members.deliverAll();
  members.wish(0, kNext);
  for (const int to : {1, 2}) members.deliver(0, to);
  for (const int from : {1, 2}) members.deliver(from, 0);
  members.leave(0);
  for (const int to : {1, 2}) members.deliverOne(0, to);
  for (const int r : {1, 2}) members.view(r, {1, 2});
  members.deliverAll();
  for (const int r : {1, 2}) EXPECT_EQ(members[r].close(), behind(0)) << r;
}

// Rank 1 decides with the leaver's report, rank 0 with its leave report: both say the same, also if
// the leaver has taken back meanwhile that it is ready.
TEST(FlushClose, ALeaveReportSaysWhetherItsLastReportWasReady) {
  for (const bool wasReady : {false, true}) {
    Members members(3);
    for (int r = 0; r < 3; ++r) {
      if (r < 2 || wasReady) members.ready(r, kNext);
    }
    members.deliverAll();
    members.wish(0, kNext);
    if (!wasReady) members.take(0, members[0].reconnected(1, true, kStart));
    members.deliver(0, 1);
    members.deliver(0, 2);
    members.deliverOne(2, 1);
    ASSERT_FALSE(members[1].isFrozen());
    ASSERT_EQ(members[1].close().has_value(), wasReady);
    members.letters.clear();  // also the leaver's report to rank 0
    members.wish(0, 0);       // its report has said the wish; no further round begins
    members.take(2, wasReady ? members[2].notReadyFor(kNext) : *members[2].readyFor(kNext));
    members.letters.clear();
    members.leave(2);
    members.deliver(2, 0);
    EXPECT_TRUE(members[0].isFrozen()) << "it lacks rank 1's report";
    members.take(0, members[0].tick(kStart + std::chrono::hours(1)));
    members.deliver(0, 1);
    members.deliver(1, 0);
    ASSERT_FALSE(members[0].isFrozen());
    EXPECT_EQ(members[0].attempt(), members[1].attempt());
    EXPECT_EQ(members[0].close(), members[1].close());
  }
}

// A member that left before is not asked: the others go on without it.
TEST(FlushClose, AMemberThatHasLeftNeedNotBeReady) {
  Members members(3);
  members.leave(2);
  members.deliverAll();
  members.ready(0, kNext);
  members.ready(1, kNext);
  members.wish(1, kNext);
  members.deliverAll();
  for (const int r : {0, 1}) EXPECT_EQ(members[r].close(), behind(0));
}

// A member has decided with the report of a leaver, which went on to a later flush. A member that
// has only its leave report does not decide the earlier flush without the close.
TEST(FlushClose, ALeaversLaterFlushIsJoinedWhereACloseMayBeDecided) {
  FlushMachine machine(
      {.group = "test", .rank = 0, .size = 2, .mostRounds = 100, .resend = kResend});
  machine.readyFor(kNext);
  machine.parked(1, AbortReason::kNone, {}, kStart);
  machine.stopped();
  const FlushReport last{.from = 1, .attempt = {0, 2}, .ended = 0};
  machine.received(1, {.kind = Kind::kLeft, .report = last}, kStart);
  EXPECT_TRUE(machine.isFrozen());
  EXPECT_EQ(machine.target(), (Attempt{0, 2}));
  machine.stopped();
  EXPECT_FALSE(machine.isFrozen());
  EXPECT_EQ(machine.attempt(), (Attempt{0, 2}));
}

TEST(FlushClose, WhoIsNotReadyIsAsked) {
  Members members(2);
  members.allReady(kNext);
  members.letters.clear();  // lost
  members.wish(0, kNext);
  ASSERT_TRUE(members[0].nextTick());
  EXPECT_TRUE(members[0].tick(*members[0].nextTick() - Clock::duration(1)).empty());
  members.now = *members[0].nextTick();
  members.take(0, members[0].tick(members.now));
  ASSERT_EQ(members.letters.size(), 1u);
  EXPECT_EQ(members.letters[0].message.kind, Kind::kAsk);
  members.deliverAll();
  for (const int r : {0, 1}) EXPECT_EQ(members[r].close(), behind(0));
}

// A wish that came too late for the report of a flush starts another one.
TEST(FlushClose, AWishInAFlushIsFulfilledByTheNext) {
  Members members(2);
  members.allReady(kNext);
  members.deliverAll();
  members.begin(1, 1);
  members.park(1, 1);
  members.deliver(1, 0);
  members.park(1, 1);  // interrupted, reported
  members.wish(1, kNext);
  EXPECT_FALSE(members[1].close());
  members.deliverAll();
  for (const int r : {0, 1}) EXPECT_EQ(members[r].close(), behind(1));
}

// A member takes back that it is ready while the round is under way. The round decides nothing, and
// none follows until the member is ready again.
TEST(FlushClose, AMemberThatIsNotReadyKeepsTheSeriesOpen) {
  Members members(3);
  members.allReady(kNext);
  members.deliverAll();
  members.take(2, members[2].notReadyFor(kNext));
  members.wish(0, kNext);  // which has not heard it
  members.deliverAll();
  for (int r = 0; r < 3; ++r) {
    EXPECT_FALSE(members[r].isFrozen());
    EXPECT_FALSE(members[r].close());
    EXPECT_EQ(members[r].attempt(), (Attempt{0, 1}));
  }
  members.ready(2, kNext);
  members.deliverAll();
  for (int r = 0; r < 3; ++r) EXPECT_EQ(members[r].close(), behind(0));
}

// A rank's knowledge of who is ready follows the reports, too: else its wish would begin a round
// again and again.
TEST(FlushClose, AReportThatIsNotReadyEndsTheRounds) {
  Members members(2);
  members.ready(0, kNext);
  members.wish(0, kNext);
  FlushMessage stale{.kind = Kind::kEnded, .ready = {kNext}};
  members.take(0, members[0].received(1, stale, kStart));
  ASSERT_TRUE(members[0].isFrozen());
  members.deliverAll();
  EXPECT_FALSE(members[0].isFrozen());
  EXPECT_EQ(members[0].attempt(), (Attempt{0, 1}));
}

TEST(FlushClose, TheWishOfADeadRankIsGone) {
  Members members(3);
  members.allReady(kNext);
  members.deliverAll();
  members.wish(0, kNext);
  members.deliver(0, 1);
  members.die(0);
  for (const int r : {1, 2}) members.view(r, {1, 2});
  members.deliverAll();
  for (const int r : {1, 2}) {
    EXPECT_FALSE(members[r].isFrozen());
    EXPECT_FALSE(members[r].close());
  }
  members.wish(2, kNext);
  members.deliverAll();
  for (const int r : {1, 2}) EXPECT_EQ(members[r].close(), behind(0));
}

TEST(FlushClose, OfTwoSuccessorsOneIsChosenByAll) {
  Members members(2);
  members.allReady(kNext);
  members.allReady(kOther);
  EXPECT_FALSE(members[0].readyFor(3)) << "two at a time";
  members.wish(0, kOther);
  members.wish(1, kNext);
  members.deliverAll();
  ASSERT_TRUE(members[0].close());
  EXPECT_EQ(members[0].close(), members[1].close());
  EXPECT_EQ(members[0].wish(), 0u);
  EXPECT_EQ(members[1].wish(), 0u);
}

TEST(FlushClose, OnlyASuccessorForWhichAllAreReadyIsChosen) {
  Members members(2);
  members.allReady(kOther);
  members.ready(0, kNext);
  members.wish(0, kNext);
  members.wish(1, kOther);
  members.deliverAll();
  for (const int r : {0, 1}) EXPECT_EQ(members[r].close(), behind(0, kOther));
}

// All have the same close in every order of messages, deaths and views.
TEST(FlushClose, AtRandomAllCloseAtOnePlace) {
  size_t closed = 0;
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    std::mt19937_64 random(seed);
    const auto below = [&](uint64_t end) { return random() % end; };
    const int size = 3 + int(below(2));
    Members members(size, below(2) == 0);
    std::vector<int> alive;
    for (int r = 0; r < size; ++r) alive.push_back(r);
    std::vector<std::pair<uint64_t, Attempt>> begun(size_t(size), {0, Attempt{}});
    std::map<int, std::vector<int>> unseen;  // the view that a rank has yet to see
    int deaths = int(below(2)), wishes = 1 + int(below(2)), rounds = int(below(3));
    members.allReady(kNext);
    const auto canBegin = [&](int r) {
      FlushMachine& machine = members[r];
      const uint64_t next = machine.ended() + 1;
      return !members.isBusy(r) && !machine.isFrozen() && machine.toTake() == 0 && next <= 3 &&
             (!machine.close() || next <= machine.close()->number);
    };
    for (int step = 0; step < 300; ++step) {
      const int r = alive[below(alive.size())];
      switch (below(8)) {
        case 0:
          if (!canBegin(r)) break;
          begun[size_t(r)] = {members[r].ended() + 1, members[r].attempt()};
          members.begin(r, begun[size_t(r)].first);
          break;
        case 1:  // all have begun this attempt: it ends
          if (members.isBusy(r) && !members[r].isFrozen() &&
              std::ranges::all_of(members[r].active(), [&](int other) {
                return begun[size_t(other)] == begun[size_t(r)];
              }))
            members.end(r, begun[size_t(r)].first);
          break;
        case 2:
          if (members.isBusy(r) && members[r].isFrozen()) members.park(r, begun[size_t(r)].first);
          if (members[r].toTake() != 0) {
            members[r].hasEnded(members[r].toTake());
            members.take(r, members[r].caughtUp());
          }
          break;
        case 3:
          if (wishes > 0 && !members[r].close()) --wishes, members.wish(r, kNext);
          break;
        case 4:
          if (rounds > 0 && members.isBusy(r) && !members[r].isFrozen())
            --rounds, members.park(r, begun[size_t(r)].first);
          break;
        case 5:
          if (deaths == 0 || step < 30) break;
          --deaths;
          members.die(r);
          std::erase(alive, r);
          for (const int other : alive) unseen[other] = alive;
          break;
        case 6:
          if (const auto found = unseen.find(r); found != unseen.end()) {
            members.view(r, found->second);
            unseen.erase(found);
          }
          break;
        default:
          if (!members.letters.empty()) {
            const auto& one = members.letters[below(members.letters.size())];
            members.deliverOne(one.from, one.to);
          }
      }
      // Not the view, which a member may not have yet: all that live and have acted.
      std::optional<SeriesClose> close;
      for (const int one : alive) {
        if (!members[one].close()) continue;
        ASSERT_TRUE(!close || close == members[one].close()) << "seed " << seed;
        close = members[one].close();
      }
      for (const int one : alive) {
        if (!close) break;
        ASSERT_LE(begun[size_t(one)].first, close->number)
            << "seed " << seed << ": rank " << one << " has begun an operation behind the close";
      }
      closed += close.has_value();
    }
  }
  EXPECT_GT(closed, 1000u);
}

}  // namespace
}  // namespace mooncake
