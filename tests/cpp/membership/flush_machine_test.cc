// A member at the edges of a flush, without threads. The models' traces drive the same machine
// (replay_test.cc); here are the cases for which the models have no step.
#include "membership/flush_machine.h"

#include <gtest/gtest.h>

namespace mooncake {
namespace {

using AbortReason = FlushReport::AbortReason;
using Kind = FlushMessage::Kind;

constexpr Clock::time_point kNow{};
constexpr auto kResend = std::chrono::milliseconds(50);

FlushMachine machineOf(int rank, int size, bool raises = false) {
  return FlushMachine({.group = "test",
                       .rank = rank,
                       .size = size,
                       .raises = raises,
                       .mostRounds = 3,
                       .resend = kResend});
}

template <typename Action>
std::vector<Action> all(const FlushActions& actions) {
  std::vector<Action> found;
  for (const auto& action : actions) {
    if (const auto* one = std::get_if<Action>(&action)) found.push_back(*one);
  }
  return found;
}

FlushMessage reportOf(FlushReport report, Kind kind = Kind::kReport) {
  return {.kind = kind, .report = std::move(report)};
}

const Error kTooLate{ErrorCode::kTimeout, "too late"};

// The leaver's report binds, but no decision asks for it: the leaver is not in the view.
TEST(FlushMachine, HowAnOperationEndedOnWhoHasLeftItEndsAlsoBehindAView) {
  FlushMachine machine = machineOf(0, 3);
  machine.parked(1, AbortReason::kNone, {}, kNow);
  machine.stopped();
  machine.received(
      1,
      reportOf({.from = 1, .attempt = {0, 1}, .ended = 1, .failed = {{1, kTooLate}}}, Kind::kLeft),
      kNow);
  EXPECT_TRUE(machine.isFrozen()) << "rank 2 has not reported";
  machine.viewed({.epoch = 3, .active = {0}, .losses = {{2, "it died"}}}, kNow);
  const auto actions = machine.stopped();
  const auto goOn = all<FlushAction::GoOn>(actions);
  ASSERT_EQ(goOn.size(), 1u);
  EXPECT_EQ(goOn[0].members, std::vector{0});
  EXPECT_EQ(machine.ended(), 1u) << "it ran again, without rank 1";
  EXPECT_EQ(machine.howEnded(1).message, "too late");
}

TEST(FlushMachine, WhoDestroyedTheJobOnItsSideIsNoNews) {
  for (const bool isLoss : {false, true}) {
    FlushMachine machine = machineOf(0, 2, true);
    FlushView view{.epoch = 2, .active = {0}};
    if (isLoss) view.losses.push_back({1, "it died"});
    machine.viewed(view, kNow);
    EXPECT_EQ(all<FlushAction::GoOn>(machine.stopped()).size(), 1u);
    EXPECT_EQ(machine.ended(), isLoss ? 1u : 0u);
    if (isLoss) {
      EXPECT_EQ(machine.howEnded(1).message, "lost rank 1 (it died)");
    }
  }
}

TEST(FlushMachine, AsksForAReportAsLongAsItLacksOne) {
  FlushMachine machine = machineOf(0, 3);
  EXPECT_FALSE(machine.nextTick());
  machine.parked(1, AbortReason::kTimeout, kTooLate, kNow);
  machine.stopped();
  machine.received(2, reportOf({.from = 2, .attempt = {0, 1}}), kNow);
  ASSERT_TRUE(machine.nextTick());
  EXPECT_TRUE(machine.tick(*machine.nextTick() - Clock::duration(1)).empty());
  auto pause = kResend;
  for (Clock::time_point last = kNow; pause < 8 * kResend; pause *= 2) {
    EXPECT_GE(*machine.nextTick(), last + pause / 2);
    EXPECT_LE(*machine.nextTick(), last + pause);
    last = *machine.nextTick();
    const auto asked = all<FlushAction::Tell>(machine.tick(last));
    ASSERT_EQ(asked.size(), 1u);
    EXPECT_EQ(asked[0].to, std::vector{1});
    EXPECT_EQ(asked[0].message.kind, Kind::kRepeat);
    EXPECT_EQ(asked[0].message.report.why.message, "too late");
  }
  machine.received(1, reportOf({.from = 1, .attempt = {0, 1}}), kNow);
  EXPECT_FALSE(machine.isFrozen());
  EXPECT_FALSE(machine.nextTick());
}

TEST(FlushMachine, WhoAsksIsAnsweredWithTheReportOrTheFarewell) {
  FlushMachine machine = machineOf(0, 2);
  const FlushReport theirs{.from = 1, .attempt = {0, 1}};
  machine.received(1, reportOf(theirs), kNow);
  machine.stopped();
  EXPECT_FALSE(machine.isFrozen());
  auto answers = all<FlushAction::Tell>(machine.received(1, reportOf(theirs, Kind::kRepeat), kNow));
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_EQ(answers[0].message.kind, Kind::kReport);
  EXPECT_EQ(answers[0].message.report.attempt, theirs.attempt);
  machine.leave();
  answers = all<FlushAction::Tell>(machine.received(1, reportOf(theirs, Kind::kRepeat), kNow));
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_EQ(answers[0].message.kind, Kind::kLeft);
}

// Ranks that leave after operation 1. Their messages arrive in the order of sending.
struct Leavers {
  explicit Leavers(int size) {
    for (int r = 0; r < size; ++r) {
      machines.push_back(machineOf(r, size));
      machines.back().hasEnded(1);
    }
  }
  // Delivers all messages that follow. Counts them.
  void leaving(int rank) { carryOut(rank, machines[size_t(rank)].leaving(1)); }
  void carryOut(int rank, const FlushActions& actions) {
    for (const auto& told : all<FlushAction::Tell>(actions)) {
      for (const int to : told.to) {
        ++sent;
        auto bytes = encodeFlushMessage(told.message);
        const auto message = decodeFlushMessage(bytes, int(machines.size()));
        ASSERT_TRUE(message.ok());
        carryOut(to, machines[size_t(to)].received(rank, *message, kNow));
      }
    }
  }
  bool knowsAll(int rank) const {
    return std::ranges::all_of(machines, [&](const FlushMachine& one) {
      const auto r = size_t(&one - machines.data());
      return int(r) == rank || machines[size_t(rank)].knownEnded()[r] >= 1;
    });
  }

  std::vector<FlushMachine> machines;
  int sent = 0;
};

TEST(FlushMachine, RanksThatLeaveTogetherSendAFewMessagesEach) {
  for (const auto& [size, rounds] : {std::pair(2, 1), {3, 2}, {5, 3}, {64, 6}, {128, 7}}) {
    Leavers ranks(size);
    for (int r = size - 1; r > 0; --r) ranks.leaving(r);
    EXPECT_FALSE(ranks.machines[1].doAllLeave());
    ranks.leaving(0);
    EXPECT_EQ(ranks.sent, size * rounds);
    for (int r = 0; r < size; ++r) {
      EXPECT_TRUE(ranks.knowsAll(r));
      EXPECT_TRUE(ranks.machines[size_t(r)].doAllLeave());
      EXPECT_TRUE(all<FlushAction::Tell>(ranks.machines[size_t(r)].leave()).empty())
          << "no rank needs its leave report";
    }
  }
}

TEST(FlushMachine, ARankThatStaysGetsTheLeaveReports) {
  Leavers ranks(4);
  for (int r = 0; r < 3; ++r) ranks.leaving(r);
  EXPECT_FALSE(ranks.knowsAll(0));
  ranks.carryOut(0, {FlushAction::Tell{{3}, {.kind = Kind::kAsk}}});
  EXPECT_TRUE(ranks.knowsAll(0)) << "rank 3 says that it has ended the operation";
  EXPECT_FALSE(ranks.machines[0].doAllLeave());
  const auto told = all<FlushAction::Tell>(ranks.machines[0].leave());
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].message.kind, Kind::kLeft);
  EXPECT_TRUE(std::ranges::find(told[0].to, 3) != told[0].to.end());
}

// A break may have lost all that a leaver said of itself, and all that it passed on.
TEST(FlushMachine, TheLastWordsOfALeaverSayAllThatItKnows) {
  Leavers ranks(3);
  EXPECT_TRUE(ranks.machines[0].lastWords().empty()) << "it has not left";
  const FlushMessage theirs{.kind = Kind::kEnded, .ended = 1, .alsoEnded = {1}, .leaving = {1}};
  ranks.machines[0].received(1, theirs, kNow);
  ranks.machines[0].leave();
  EXPECT_FALSE(ranks.knowsAll(2));
  for (const FlushMessage& message : ranks.machines[0].lastWords())
    ranks.machines[2].received(0, message, kNow);
  EXPECT_TRUE(ranks.knowsAll(2)) << "rank 1's end, too";
  EXPECT_FALSE(ranks.machines[2].isActive(0));
  EXPECT_TRUE(ranks.machines[2].doAllLeave());
}

// A member that leaves waits for other members no longer than its deadline.
TEST(FlushMachine, AnOperationThatALeaverHasEndedIsStillAwaited) {
  FlushMachine machine = machineOf(0, 2);
  machine.hasEnded(1);
  machine.received(1, {.kind = Kind::kLeft, .report = {.from = 1, .ended = 2, .stoppedAt = 3}},
                   kNow);
  EXPECT_FALSE(machine.doAllLeave());
  machine.hasEnded(2);
  EXPECT_TRUE(machine.doAllLeave());
}

// Its operation may have ended here only because of an abort that the other ranks do not know of.
TEST(FlushMachine, ARankThatIsBehindTellsAllThatItLeaves) {
  FlushMachine machine = machineOf(0, 3);
  machine.hasEnded(1);
  FlushMessage theirs{.kind = Kind::kEnded, .ended = 1, .alsoEnded = {1, 2}, .leaving = {1, 2}};
  machine.received(1, theirs, kNow);
  EXPECT_TRUE(all<FlushAction::Tell>(machine.leaving(2)).empty());
  const auto told = all<FlushAction::Tell>(machine.leave());
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].to, (std::vector{1, 2}));
}

// Puts and reports that a peer sent because of the last decision may be lost.
TEST(FlushMachine, AConnectionMadeAgainStartsARoundForWhoIsInAnOperation) {
  FlushMachine machine = machineOf(0, 2);
  auto actions = machine.reconnected(1, false, kNow);
  EXPECT_FALSE(machine.isFrozen());
  auto told = all<FlushAction::Tell>(actions);
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].message.kind, Kind::kEnded);
  machine.reconnected(1, true, kNow);
  EXPECT_EQ(machine.target(), (Attempt{0, 1}));
  machine.stopped();
  machine.reconnected(1, false, kNow);
  EXPECT_EQ(machine.target(), (Attempt{0, 2})) << "the report may be lost with it";
  EXPECT_FALSE(machine.hasReported());
}

TEST(FlushMachine, ARoundForWhichAStampHasNoRoomEndsTheGroupOnAllRanks) {
  FlushMachine machine = machineOf(0, 2);
  for (uint32_t round = 1; round <= 3; ++round) {
    machine.received(1, reportOf({.from = 1, .attempt = {0, round}}), kNow);
    machine.stopped();
    ASSERT_EQ(machine.attempt(), (Attempt{0, round}));
  }
  const auto actions = machine.parked(1, AbortReason::kNone, {}, kNow);
  ASSERT_EQ(all<FlushAction::Fail>(actions).size(), 1u);
  const auto told = all<FlushAction::Tell>(actions);
  ASSERT_EQ(told.size(), 1u);
  FlushMachine other = machineOf(1, 2);
  EXPECT_EQ(all<FlushAction::Fail>(other.received(0, told[0].message, kNow)).size(), 1u);
}

}  // namespace
}  // namespace mooncake
