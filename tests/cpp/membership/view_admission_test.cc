// Rules of docs/membership.md, section 9, "Admission": one test for each mutant of the table there.
#include <gtest/gtest.h>
#include <memory>
#include <vector>

#include "membership/view_agreement.h"

namespace mooncake {
namespace {

constexpr Clock::time_point kNow{};
constexpr ViewAgreement::Timing kTiming{.grace = std::chrono::milliseconds(20),
                                        .resend = std::chrono::milliseconds(50)};
using LastReport = ViewAgreement::LastReport;

EngineId idOf(int process) {
  EngineId id{};
  id[0] = std::byte(process + 1);
  return id;
}

// A job of some ranks, processes 0, 1, ... `out` were ranks of it and have left in peace. More
// processes are candidates.
class World {
 public:
  World(int ranks, const JobRanks& out, bool admits = true) : admits_(admits) {
    for (int r = 0; r < ranks; ++r) term_.holders.push_back(Holder{idOf(r)});
    for (int r = 0; r < ranks; ++r) {
      seats_.push_back(r);
      machines_.push_back(std::make_unique<ViewAgreement>(ViewAgreement::Options{
          .id = idOf(r), .term = term_, .timing = kTiming, .admits = admits_}));
    }
    out.forEach([&](int gone) {
      for (int r = 0; r < ranks; ++r) {
        if (!out.contains(r)) at(r).left(gone, kNow);
      }
    });
    const JobRanks rest = JobRanks::firstRanks(ranks) - out;
    rest.forEach([&](int from) { rest.forEach([&](int to) { tell(from, to); }); });
    rest.forEach([&](int r) { EXPECT_EQ(at(r).view().active, rest); });
  }

  // Adds a candidate for this rank, which knows the roster of the first term.
  int add(int seat) {
    seats_.push_back(seat);
    const int process = static_cast<int>(machines_.size());
    machines_.push_back(std::make_unique<ViewAgreement>(ViewAgreement::Options{.id = idOf(process),
                                                                               .term = term_,
                                                                               .asksFor = seat,
                                                                               .timing = kTiming,
                                                                               .admits = admits_}));
    return process;
  }
  ViewActions admit(int member, int process) {
    return at(member).admit(seats_[size_t(process)], idOf(process), kNow);
  }

  ViewAgreement& at(int process) { return *machines_[size_t(process)]; }
  int number(int at, int process) {
    return machines_[size_t(at)]->numberOf(idOf(process), seats_[size_t(process)]).value_or(-1);
  }
  // `to` gets the report of `from`, over the wire form.
  ViewActions tell(int from, int to) { return give(say(from), from, to); }
  Bytes say(int process) { return encodeViewReport(at(process).report()); }
  ViewActions give(const Bytes& said, int from, int to) {
    if (from == to) return {};
    auto report = decodeViewReport(said, term_.size());
    EXPECT_TRUE(report.ok());
    report->from = number(to, from);
    return at(to).received(*report, kNow);
  }
  // All of these tell each other, until nothing changes.
  void talk(const std::vector<int>& processes) {
    for (int round = 0; round < 4; ++round) {
      for (const int from : processes) {
        for (const int to : processes) tell(from, to);
      }
    }
  }
  ViewActions suspect(int at, const std::vector<int>& processes) {
    JobRanks numbers;
    for (const int process : processes) numbers.add(number(at, process));
    return this->at(at).suspected(numbers, Cause::kRefused, kNow);
  }

 private:
  const bool admits_;
  Term term_;
  std::vector<int> seats_;
  std::vector<std::unique_ptr<ViewAgreement>> machines_;
};

TEST(ViewAdmission, ACandidateTakesTheRankOfAProcessThatIsOut) {
  World world(3, {1});
  const int c = world.add(1);
  EXPECT_FALSE(world.at(0).mayAdmit(2)) << "a living process holds it";
  ASSERT_TRUE(world.at(0).mayAdmit(1));
  world.admit(0, c);
  EXPECT_FALSE(world.at(0).mayAdmit(1)) << "a candidate asks for it";
  world.talk({0, 2, c});
  for (const int process : {0, 2, c}) {
    const ViewAgreement& machine = world.at(process);
    EXPECT_EQ(machine.view(), (View{3, {0, 1, 2}})) << "one removal and one join";
    EXPECT_EQ(machine.term(), world.at(0).term());
    EXPECT_EQ(machine.term().holders[1], (Holder{idOf(c), 1}));
    EXPECT_TRUE(machine.report().out().empty());
    EXPECT_FALSE(machine.nextTick());
  }
  EXPECT_EQ(world.at(c).self(), 1);
  EXPECT_FALSE(world.at(c).isCandidate());
  // Once more, and the epoch grows on.
  for (const int r : {0, 2}) world.at(r).exited({1}, LastReport::kReceived, kNow);
  world.talk({0, 2});
  EXPECT_EQ(world.at(2).view(), (View{4, {0, 2}}));
  EXPECT_TRUE(world.at(0).mayAdmit(1));
}

// mut-join-unasked
TEST(ViewAdmission, ACandidateThatHasNotReportedIsInNoView) {
  World world(3, {1});
  const int c = world.add(1);
  for (const int r : {0, 2}) world.admit(r, c);
  world.talk({0, 2});
  for (const int r : {0, 2}) EXPECT_EQ(world.at(r).view(), (View{2, {0, 2}}));
  world.talk({0, 2, c});
  EXPECT_EQ(world.at(0).view(), (View{3, {0, 1, 2}}));
}

// mut-join-quorum: 1 and c may have closed the term, and would be two of three.
TEST(ViewAdmission, AQuorumIsNeededInEachRosterThatMayFollow) {
  World world(3, {2});
  const int c = world.add(2);
  world.admit(0, c);
  world.tell(0, 1);
  world.tell(1, c);
  world.tell(0, c);
  world.tell(c, 1);
  ASSERT_EQ(world.at(1).term().number, 1u) << "1 has closed the term, with the report of 0";
  EXPECT_TRUE(world.suspect(0, {1, c}).minority) << "though it is half of {0, 1} with the senior";
  EXPECT_EQ(world.at(0).view(), (View{2, {0, 1}}));
}

// mut-join-certain
TEST(ViewAdmission, AnExitWithoutALastWordNeedsAQuorum) {
  for (const bool admits : {true, false}) {
    World world(2, {}, admits);
    const ViewActions actions = world.at(1).exited({0}, LastReport::kUnknown, kNow);
    EXPECT_EQ(actions.minority, admits) << "0 may have helped a candidate in";
    EXPECT_EQ(actions.commit.has_value(), !admits);
  }
  World world(2, {});
  EXPECT_TRUE(world.at(1).exited({0}, LastReport::kReceived, kNow).commit);
}

// mut-join-amnesia
TEST(ViewAdmission, WhatWasReportedBeyondACloseIsKept) {
  World world(4, {3});
  const int c = world.add(3);
  world.admit(0, c);
  for (const int r : {1, 2}) world.tell(0, r);
  for (const int r : {0, 1, 2}) world.tell(r, c);
  ASSERT_EQ(world.at(c).term().number, 1u);
  world.suspect(0, {c});
  EXPECT_EQ(world.at(0).term().number, 0u);
  world.tell(c, 2);
  ASSERT_EQ(world.at(2).term().number, 1u);
  const ViewActions actions = world.tell(2, 0);
  EXPECT_EQ(world.at(0).term().number, 1u);
  ASSERT_EQ(actions.next.size(), 1u);
  EXPECT_EQ(world.at(0).report().suspected, JobRanks{3}) << "c, which holds the rank now";
  EXPECT_TRUE(world.at(0).nextTick());
}

// mut-join-alone
TEST(ViewAdmission, NewcomersAreNeverAJobOfTheirOwn) {
  World third(3, {1, 2});
  const int e = third.add(1), f = third.add(2);
  third.admit(0, e);
  third.admit(0, f);
  third.tell(0, e);
  ASSERT_EQ(third.at(e).term().number, 0u) << "it lacks the report of f";
  const ViewActions alone = third.at(e).exited({0}, LastReport::kReceived, kNow);
  EXPECT_TRUE(alone.minority);
  EXPECT_FALSE(alone.commit);
  third.tell(0, f);
  EXPECT_TRUE(third.at(f).exited({0}, LastReport::kReceived, kNow).minority);
}

// mut-join-believed
TEST(ViewAdmission, ACandidateThatCannotHearAMemberCostsItNothing) {
  World world(4, {3});
  const int c = world.add(3);
  world.admit(0, c);
  for (const int process : {1, 2, c}) world.tell(0, process);
  world.suspect(c, {1});
  ASSERT_TRUE(world.at(c).report().suspected.contains(1));
  world.tell(c, 0);
  EXPECT_TRUE(world.at(0).report().out() == JobRanks{3}) << "rank 1 stays";
  world.at(0).tick(kNow + kTiming.grace);
  ASSERT_EQ(world.at(0).report().joins.size(), 1u);
  EXPECT_EQ(world.at(0).report().joins[0].state, Join::State::kSuspected);
  EXPECT_EQ(world.at(0).report().joins[0].cause, Cause::kSuspects);
  world.talk({0, 1, 2});
  for (const int r : {0, 1, 2}) {
    EXPECT_EQ(world.at(r).view().active, (JobRanks{0, 1, 2}));
    EXPECT_EQ(world.at(r).term().number, 1u) << "the term is closed, or its joins would pile up";
    EXPECT_EQ(world.at(r).view().epoch, 4u);
    EXPECT_TRUE(world.at(r).mayAdmit(3));
  }
  EXPECT_TRUE(world.tell(0, c).evicted);
}

// mut-join-terms
TEST(ViewAdmission, AReportOfAnOlderTermSaysNothingOfASuccessor) {
  World world(3, {1});
  const int c = world.add(1);
  world.admit(0, c);
  world.talk({0, c});
  const Bytes old = world.say(2);  // "rank 1 is gone"
  for (const int process : {0, c}) world.tell(process, 2);
  for (const int process : {0, c, 2}) world.tell(2, process);
  world.talk({0, c, 2});
  ASSERT_EQ(world.at(0).term().number, 1u);
  const ViewActions actions = world.give(old, 2, 0);
  EXPECT_TRUE(world.at(0).report().out().empty());
  EXPECT_TRUE(actions.sendTo.contains(2)) << "it hears how its term was closed";
}

// The last word of a rank counts, also if it is of an older term.
TEST(ViewAdmission, ALastWordOfAnOlderTermCounts) {
  World world(4, {3});
  const int c = world.add(3);
  world.admit(0, c);
  for (const int r : {1, 2}) world.tell(0, r);
  for (const int r : {1, 2, 0}) world.tell(r, c);
  const Bytes old = world.say(2);
  ASSERT_EQ(world.at(c).term().number, 1u);
  world.tell(c, 0);
  world.tell(c, 1);
  world.talk({0, 1, c});
  ASSERT_EQ(world.at(0).term().number, 1u);
  world.give(old, 2, 0);  // its crash report
  world.at(0).exited({2}, LastReport::kReceived, kNow);
  EXPECT_TRUE(world.at(0).report().settled.contains(2)) << "nothing in it is unknown here";
}

TEST(ViewAdmission, ALastWordThatNamesAnUnknownCandidateDoesNotSettle) {
  World world(4, {3});
  const int c = world.add(3);
  world.suspect(1, {0});
  world.admit(0, c);
  world.tell(0, 1);  // its crash report
  world.at(1).exited({0}, LastReport::kReceived, kNow);
  EXPECT_TRUE(world.at(1).report().gone.contains(0));
  EXPECT_FALSE(world.at(1).report().settled.contains(0)) << "it may have helped c in";
}

// mut-join-two
TEST(ViewAdmission, OfTwoForOneRankTheLowerIdIsLetIn) {
  World world(3, {1});
  const int a = world.add(1), b = world.add(1);
  world.admit(0, b);
  world.admit(2, a);
  world.tell(0, b);
  world.tell(2, a);
  world.tell(0, 2);
  world.tell(2, 0);
  for (const int r : {0, 2}) {
    EXPECT_TRUE(world.at(r).out().contains(world.number(r, b)));
    EXPECT_FALSE(world.at(r).out().contains(world.number(r, a)));
  }
  world.talk({0, 2, a});
  for (const int process : {0, 2, a}) {
    EXPECT_EQ(world.at(process).view().active, (JobRanks{0, 1, 2}));
    EXPECT_EQ(world.at(process).term().holders[1]->id, idOf(a));
  }
  EXPECT_TRUE(world.tell(0, b).evicted);
}

// "Lowest" would end the last member of a job because of a newcomer with rank 0.
TEST(ViewAdmission, TheOldestMemberIsTheSenior) {
  World world(2, {0});
  const int c = world.add(0);
  world.admit(1, c);
  world.talk({1, c});
  ASSERT_EQ(world.at(1).view().active, (JobRanks{0, 1}));
  EXPECT_TRUE(world.suspect(c, {1}).minority);
  EXPECT_TRUE(world.suspect(1, {c}).commit);
}

TEST(ViewAdmission, ARankThatTookTwoStepsFollowsOneThatTookBothAtOnce) {
  World world(4, {3});
  const int c = world.add(3);
  world.admit(0, c);
  for (const int r : {1, 2}) world.tell(0, r);
  for (const int r : {1, 2, c}) world.tell(r, 0);
  world.tell(0, c);
  for (const int r : {1, 2}) world.tell(c, r);
  ASSERT_EQ(world.at(0).term().number, 0u) << "c has not reported to it yet";
  world.tell(c, 0);
  ASSERT_EQ(world.at(0).term().number, 1u);
  // 1 and c find 2 silent before they close the term.
  world.suspect(1, {2});
  world.suspect(c, {2});
  const Bytes first = world.say(0);
  for (const int from : {1, c}) world.tell(from, 0);
  EXPECT_EQ(world.at(0).report().suspected, (JobRanks())) << "their reports are of an older term";
  world.give(first, 0, 1);
  world.give(first, 0, c);
  world.talk({0, 1, c});
  for (const int process : {0, 1, c}) {
    EXPECT_EQ(world.at(process).view(), world.at(0).view());
    EXPECT_EQ(world.at(process).view().active, (JobRanks{0, 1, 3}));
  }
}

TEST(ViewReport, OfALaterTermIsReadAsWritten) {
  ViewReport report{.from = 3,
                    .committed = {1},
                    .gone = {1},
                    .settled = {1},
                    .accusations = {{1, Cause::kExited, 2}},
                    .isCandidate = true,
                    .term = {2, 77},
                    .epoch = 9};
  report.close = Close{.digest = 5,
                       .out = {{2, Cause::kSilent, 0}},
                       .newcomers = {{2, idOf(7), false}, {4, idOf(8), true}}};
  report.joins = {{.rank = 1, .id = idOf(9)},
                  {.rank = 3,
                   .id = idOf(4),
                   .state = Join::State::kSuspected,
                   .cause = Cause::kSeatTaken,
                   .by = 0}};
  const auto read = decodeViewReport(encodeViewReport(report), 5);
  ASSERT_TRUE(read.ok()) << read.error().message;
  EXPECT_EQ(*read, report);

  const auto refused = [&](auto change) {
    ViewReport other = report;
    change(other);
    return !decodeViewReport(encodeViewReport(other), 5).ok();
  };
  EXPECT_FALSE(refused([](auto&) {}));
  EXPECT_TRUE(refused([](auto& r) { r.joins[0].rank = 5; }));
  EXPECT_TRUE(refused([](auto& r) { r.joins[1].cause = Cause::kExited; })) << "certain and not";
  EXPECT_TRUE(refused([](auto& r) { r.joins[1].state = Join::State(4); }));
  EXPECT_TRUE(refused([](auto& r) { std::swap(r.joins[0], r.joins[1]); }));
  EXPECT_TRUE(refused([](auto& r) { r.joins.resize(65, r.joins[1]); }));
  EXPECT_TRUE(refused([](auto& r) { r.close->newcomers.clear(); }));
  EXPECT_TRUE(refused([](auto& r) {
    r.close->newcomers[1] = {2, idOf(8), false};
  })) << "two holders of a rank";
  EXPECT_TRUE(refused([](auto& r) { r.close->out[0].rank = 5; }));
  EXPECT_TRUE(refused([](auto& r) { r.close->out[0].cause = Cause(10); }));
  EXPECT_TRUE(refused([](auto& r) { r.term.number = 0; })) << "the first term follows on none";
}

}  // namespace
}  // namespace mooncake
