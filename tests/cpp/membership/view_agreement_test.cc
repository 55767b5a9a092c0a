#include "membership/view_agreement.h"

#include <functional>
#include <gtest/gtest.h>
#include <random>
#include <type_traits>

#include "engine/contract/transport.h"
#include "view_sim.h"

namespace mooncake {
namespace {

using Time = ViewSim::Time;
using LastReport = ViewAgreement::LastReport;

constexpr Clock::time_point kStart{};
constexpr auto kGrace = ViewSim::kTiming.grace;
constexpr auto kResend = ViewSim::kTiming.resend;

// ---- sets and their wire form

template <typename A, typename B>
concept MayJoin = requires(A a, const B& b) {
  a |= b;
};
static_assert(MayJoin<JobRanks, JobRanks> && !MayJoin<JobRanks, GroupRanks>);
static_assert(MayJoin<GroupRanks, GroupRanks> && !MayJoin<GroupRanks, JobRanks>);
static_assert(!std::is_constructible_v<JobRanks, GroupRanks>);
static_assert(!std::is_constructible_v<GroupRanks, JobRanks>);

TEST(ViewRankSet, IsASet) {
  JobRanks set{3, 64, 4095};
  EXPECT_TRUE(set.contains(64));
  EXPECT_FALSE(set.contains(4));
  EXPECT_FALSE(set.contains(4096));
  EXPECT_FALSE(set.contains(-1));
  EXPECT_EQ(set.count(), 3);
  EXPECT_EQ(set.lowest(), 3);
  EXPECT_EQ((JobRanks{64, 100}.lowest()), 64);
  EXPECT_EQ(set.end(), 4096);
  EXPECT_EQ((JobRanks{63}.end()), 64);
  EXPECT_EQ(JobRanks{}.end(), 0);
  EXPECT_EQ(set - (JobRanks{64, 4095}), JobRanks{3}) << "equal sets are equal, whatever they held";
  EXPECT_EQ((set & JobRanks{64, 65}), JobRanks{64});
  EXPECT_EQ((set | JobRanks{4}), (JobRanks{3, 4, 64, 4095}));
  EXPECT_TRUE(JobRanks{3}.isSubsetOf(set));
  EXPECT_FALSE(set.isSubsetOf(JobRanks{3}));
  EXPECT_TRUE((set - set).empty());
  std::vector<int> seen;
  set.forEach([&](int rank) { seen.push_back(rank); });
  EXPECT_EQ(seen, (std::vector{3, 64, 4095}));
}

TEST(ViewRankSet, WhatIsWrittenIsRead) {
  for (const JobRanks& set : {JobRanks{}, JobRanks{0}, JobRanks{7, 8}, JobRanks{64},
                              JobRanks{0, 4095}, JobRanks::firstRanks(4096)}) {
    ByteWriter out;
    set.write(out);
    ByteReader in(out.bytes());
    EXPECT_EQ(JobRanks::read(in), set);
    EXPECT_TRUE(in.finish("set").ok());
  }
  const Bytes zeros(3);  // from another writer: no rank
  ByteWriter out;
  out.putBytes(zeros);
  ByteReader in(out.bytes());
  EXPECT_EQ(JobRanks::read(in), JobRanks{});
}

TEST(ViewRankSet, IsBounded) {
  ByteWriter out;
  out.putBytes(Bytes(JobRanks::kLimit / 8 + 1));
  ByteReader in(out.bytes());
  EXPECT_TRUE(JobRanks::read(in).empty());
  EXPECT_TRUE(in.failed());
}

// ---- reports

ViewReport someReport() {
  return {.from = 3,
          .committed = {1, 70},
          .gone = {1, 5},
          .settled = {1},
          .suspected = {0, 70},
          .accusations = {{0, Cause::kSilent, 3},
                          {1, Cause::kExited, 2},
                          {5, Cause::kLeft, 3},
                          {70, Cause::kExcludes, 71}}};
}

TEST(ViewReport, WhatIsWrittenIsRead) {
  for (const ViewReport& report : {ViewReport{.from = 4095}, someReport()}) {
    const auto read = decodeViewReport(encodeViewReport(report), JobRanks::kLimit);
    ASSERT_TRUE(read.ok()) << read.error().message;
    EXPECT_EQ(*read, report);
  }
}

TEST(ViewReport, NonsenseIsRefused) {
  const auto refused = [](const std::function<void(ViewReport&)>& change, int ranks = 100) {
    ViewReport report = someReport();
    change(report);
    return decodeViewReport(encodeViewReport(report), ranks).status().code() ==
           ErrorCode::kProtocol;
  };
  EXPECT_FALSE(refused([](auto&) {}));
  EXPECT_TRUE(refused([](auto&) {}, 70)) << "ranks that the job does not have";
  EXPECT_TRUE(refused([](auto& r) { r.from = 100; }));
  EXPECT_TRUE(refused([](auto& r) { r.from = 5; })) << "out by its own account";
  EXPECT_TRUE(refused([](auto& r) { r.committed.add(2); })) << "out of the view, but why?";
  EXPECT_TRUE(refused([](auto& r) { r.suspected.add(1); })) << "certain and not";
  EXPECT_TRUE(refused([](auto& r) { r.accusations[0].cause = Cause::kExited; }));
  EXPECT_TRUE(refused([](auto& r) { r.accusations[0].cause = Cause(7); }));
  EXPECT_TRUE(refused([](auto& r) { r.accusations[0].by = 100; }));
  EXPECT_TRUE(refused([](auto& r) { r.accusations.pop_back(); })) << "cut short";

  Bytes bytes = encodeViewReport(someReport());
  bytes.push_back(std::byte(0));
  EXPECT_FALSE(decodeViewReport(bytes, 100).ok());
  bytes.pop_back();
  bytes[0] = std::byte(2);
  EXPECT_FALSE(decodeViewReport(bytes, 100).ok()) << "another version";
}

TEST(ViewReport, AnyBytesAreRefusedOrMakeSense) {
  std::mt19937 random(20260101);
  const Bytes whole = encodeViewReport(someReport());
  for (int i = 0; i < 50000; ++i) {
    Bytes bytes(whole.begin(), whole.begin() + random() % (whole.size() + 1));
    for (int flips = random() % 4; flips > 0 && !bytes.empty(); --flips)
      bytes[random() % bytes.size()] = std::byte(random());
    const auto report = decodeViewReport(bytes, 100);
    if (report.ok()) {
      EXPECT_EQ(*decodeViewReport(encodeViewReport(*report), 100), *report);
    }
  }
}

TEST(ViewReport, TheLongestFitsIntoAControlMessage) {
  ViewReport report{.from = JobRanks::kLimit - 1};
  for (int rank = 0; rank < report.from; ++rank) {
    (rank % 2 == 0 ? report.gone : report.suspected).add(rank);
    report.accusations.push_back({rank, rank % 2 == 0 ? Cause::kExited : Cause::kSilent, rank});
  }
  report.committed = report.out();
  const Bytes bytes = encodeViewReport(report);
  EXPECT_LE(bytes.size(), Channel::kMaxMessageBytes);
  EXPECT_TRUE(decodeViewReport(bytes, JobRanks::kLimit).ok());
}

// ---- one machine by hand

View viewOf(int ranks) { return {1, JobRanks::firstRanks(ranks)}; }
ViewAgreement machine(int self, int ranks) { return {self, viewOf(ranks), ViewSim::kTiming}; }

struct Out {
  JobRanks gone, settled, suspected, committed;
};
ViewReport reportOf(int from, const Out& out) {
  ViewReport report{from, out.committed, out.gone, out.settled, out.suspected, {}};
  report.out().forEach([&](int rank) {
    const bool certain = out.gone.contains(rank);
    report.accusations.push_back({rank, certain ? Cause::kExited : Cause::kSilent, from});
  });
  return report;
}

TEST(ViewAgreement, CommitsWhenAllOthersReportTheSame) {
  auto rank = machine(0, 4);
  auto actions = rank.exited({3}, LastReport::kReceived, kStart);
  EXPECT_EQ(actions.sendTo, (JobRanks{1, 2}));
  EXPECT_EQ(actions.accused, (std::vector<Accusation>{{3, Cause::kExited, 0}}));
  EXPECT_EQ(rank.report().gone, JobRanks{3});
  EXPECT_FALSE(actions.commit);
  EXPECT_FALSE(rank.received(reportOf(1, {.gone = {3}, .settled = {3}}), kStart).commit);
  EXPECT_FALSE(rank.received(reportOf(1, {.gone = {3}, .settled = {3}}), kStart).commit);
  actions = rank.received(reportOf(2, {.suspected = {3}}), kStart);
  ASSERT_TRUE(actions.commit) << "why a rank is out may differ";
  EXPECT_EQ(*actions.commit, (View{2, {0, 1, 2}}));
  EXPECT_TRUE(actions.sendTo.empty()) << "the others see it for themselves";
  EXPECT_FALSE(rank.nextTick());
}

TEST(ViewAgreement, OldAndRepeatedReportsChangeNothing) {
  auto rank = machine(0, 3);
  rank.exited({2}, LastReport::kReceived, kStart);
  rank.received(reportOf(1, {.gone = {2}, .settled = {2}}), kStart);
  EXPECT_EQ(rank.view().epoch, 2u);
  for (const auto& old : {reportOf(1, {}), reportOf(1, {.gone = {2}, .settled = {2}}),
                          reportOf(1, {.suspected = {2}})}) {
    const auto actions = rank.received(old, kStart);
    EXPECT_FALSE(actions.commit);
    EXPECT_TRUE(actions.accused.empty());
    EXPECT_EQ(actions.sendTo, JobRanks{1}) << "it may not know yet";
  }
  const auto same = reportOf(1, {.gone = {2}, .settled = {2}, .committed = {2}});
  EXPECT_TRUE(rank.received(same, kStart).sendTo.empty()) << "nothing left to say";
  EXPECT_TRUE(rank.received(reportOf(7, {}), kStart).sendTo.empty()) << "no rank of the job";
}

TEST(ViewAgreement, AnOldReportDoesNotTakeBackANewerOne) {
  auto rank = machine(0, 4);
  rank.received(reportOf(2, {.gone = {3}, .settled = {3}}), kStart);
  EXPECT_FALSE(rank.received(reportOf(2, {}), kStart).commit);
  EXPECT_TRUE(rank.received(reportOf(1, {.gone = {3}, .settled = {3}}), kStart).commit);
}

// Holds for each of the others: a rank that counted once may have reported more since.
TEST(ViewAgreement, WhoHasReportedMoreSinceDoesNotCount) {
  for (const int turncoat : {1, 2}) {
    auto rank = machine(0, 4);
    const int other = 3 - turncoat;
    rank.exited({3}, LastReport::kReceived, kStart);
    rank.received(reportOf(turncoat, {.gone = {3}, .settled = {3}}), kStart);
    rank.received(reportOf(turncoat, {.gone = {3}, .settled = {3}, .suspected = {0}}), kStart);
    EXPECT_FALSE(rank.received(reportOf(other, {.gone = {3}, .settled = {3}}), kStart).commit);
    EXPECT_TRUE(rank.nextTick());
  }
}

TEST(ViewAgreement, SendsAgainWhileUndecided) {
  auto rank = machine(0, 3);
  rank.exited({2}, LastReport::kReceived, kStart);
  Clock::time_point last = kStart;
  for (auto pause = kResend; pause < 8 * kResend; pause *= 2) {
    const auto next = rank.nextTick();
    ASSERT_TRUE(next);
    EXPECT_GE(*next, last + pause / 2);
    EXPECT_LE(*next, last + pause);
    EXPECT_TRUE(rank.tick(*next - Clock::duration(1)).sendTo.empty());
    EXPECT_EQ(rank.tick(*next).sendTo, JobRanks{1});
    last = *next;
  }
}

TEST(ViewAgreement, AccusingALowerRankWaitsForAGrace) {
  auto rank = machine(2, 5);
  // The accusation of a higher rank waits with it. A deaf rank then accuses all at once, and no
  // rank believes it.
  EXPECT_TRUE(rank.suspected({1, 4}, Cause::kSilent, kStart).sendTo.empty());
  EXPECT_EQ(rank.nextTick(), kStart + kGrace);
  EXPECT_TRUE(rank.tick(kStart + kGrace / 2).accused.empty());
  const auto actions = rank.tick(kStart + kGrace);
  EXPECT_EQ(actions.accused,
            (std::vector<Accusation>{{1, Cause::kSilent, 2}, {4, Cause::kSilent, 2}}));
  EXPECT_EQ(actions.sendTo, (JobRanks{0, 1, 3, 4})) << "the accused learn of it";
  EXPECT_EQ(machine(2, 5).suspected({4}, Cause::kRefused, kStart).sendTo, (JobRanks{0, 1, 3, 4}));
}

TEST(ViewAgreement, WhoRefusesIsAccusedAtOnce) {
  auto rank = machine(2, 5);
  EXPECT_EQ(rank.suspected({1}, Cause::kRefused, kStart).accused,
            (std::vector<Accusation>{{1, Cause::kRefused, 2}}));
  EXPECT_TRUE(machine(2, 5).suspected({1}, Cause::kUnreachable, kStart).accused.empty());
}

// Heartbeats come at different times, so a deaf rank finds the others silent one after the other.
TEST(ViewAgreement, WhileOneIsHeldBackTheOthersWaitWithIt) {
  struct {
    const char* name;
    std::function<void(ViewAgreement&)> first;  // makes the accusation that is held back
    int held;
  } const cases[] = {
      {"silent", [](auto& rank) { rank.suspected({1}, Cause::kSilent, kStart); }, 1},
      {"excludes us", [](auto& rank) { rank.received(reportOf(3, {.suspected = {2}}), kStart); },
       3},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.name);
    auto rank = machine(2, 6);
    c.first(rank);
    auto actions = rank.suspected({5}, Cause::kSilent, kStart + kGrace / 2);
    EXPECT_TRUE(actions.accused.empty());
    EXPECT_TRUE(actions.sendTo.empty());
    rank.tick(kStart + kGrace);
    EXPECT_EQ(rank.report().suspected, (JobRanks{c.held, 5}));
  }
}

TEST(ViewAgreement, AnAccusationHeldBackIsDroppedWhenOthersAreFaster) {
  auto rank = machine(2, 4);
  rank.suspected({1}, Cause::kSilent, kStart);
  rank.received(reportOf(0, {.suspected = {1}}), kStart);
  EXPECT_EQ(rank.tick(kStart + kGrace).accused.size(), 0u);
  EXPECT_EQ(rank.report().accusations[0].by, 0);
}

TEST(ViewAgreement, WhoTakesUsOutIsNotBelieved) {
  auto rank = machine(1, 5);
  EXPECT_TRUE(rank.received(reportOf(0, {.suspected = {1, 4}}), kStart).sendTo.empty());
  const auto actions = rank.tick(kStart + kGrace);
  EXPECT_EQ(actions.accused, (std::vector<Accusation>{{0, Cause::kExcludes, 1}}));
  EXPECT_EQ(rank.report().suspected, JobRanks{0});
}

TEST(ViewAgreement, WhoIsSuspectedIsNotBelieved) {
  auto rank = machine(0, 5);
  rank.suspected({1}, Cause::kSilent, kStart);
  EXPECT_TRUE(rank.received(reportOf(1, {.suspected = {4}}), kStart).accused.empty());
  EXPECT_EQ(rank.report().suspected, JobRanks{1});
}

TEST(ViewAgreement, TheDeadAreNotBelievedAnyMore) {
  // Their view binds no rank, and their reports that are still on the wire must have no effect.
  auto rank = machine(1, 3);
  rank.exited({0}, LastReport::kUnknown, kStart);
  const auto late = reportOf(0, {.suspected = {1, 2}, .committed = {1, 2}});
  EXPECT_FALSE(rank.received(late, kStart).evicted);
  rank.received(reportOf(0, {.suspected = {2}}), kStart);
  EXPECT_EQ(rank.report().out(), JobRanks{0});
  EXPECT_TRUE(rank.tick(kStart + kResend).accused.empty()) << "nothing is held back";
}

TEST(ViewAgreement, CertainReplacesSuspicion) {
  auto rank = machine(1, 2);
  rank.suspected({0}, Cause::kSilent, kStart);  // held back: alone it would be the minority
  const auto actions = rank.exited({0}, LastReport::kReceived, kStart);
  ASSERT_TRUE(actions.commit);
  EXPECT_EQ(*actions.commit, (View{2, {1}}));
  auto other = machine(0, 4);
  other.suspected({3}, Cause::kSilent, kStart);
  EXPECT_EQ(other.exited({3}, LastReport::kReceived, kStart).sendTo, (JobRanks{1, 2}));
  EXPECT_EQ(other.report().accusations[0].cause, Cause::kExited);
  EXPECT_TRUE(other.report().suspected.empty());
}

TEST(ViewAgreement, AMinorityKeepsItsAccusationsToItself) {
  // Rank 3 lost its links to 0 and 1. Told to rank 2, that would cost rank 2 its quorum, too.
  auto rank = machine(3, 4);
  rank.suspected({0, 1}, Cause::kSilent, kStart);
  const auto actions = rank.tick(kStart + kGrace);
  EXPECT_TRUE(actions.minority);
  EXPECT_TRUE(actions.sendTo.empty());
  EXPECT_EQ(actions.accused.size(), 2u);
  EXPECT_EQ(rank.report(), ViewReport{.from = 3}) << "the goodbye carries this";
  EXPECT_FALSE(rank.nextTick());
  EXPECT_TRUE(rank.received(reportOf(2, {.gone = {0, 1}}), kStart).sendTo.empty()) << "for good";
}

TEST(ViewAgreement, HalfNeedsTheLowest) {
  auto low = machine(0, 4);
  low.suspected({2, 3}, Cause::kSilent, kStart);
  EXPECT_TRUE(low.received(reportOf(1, {.suspected = {2, 3}}), kStart).commit);
  auto high = machine(1, 4);
  EXPECT_TRUE(high.suspected({2, 3}, Cause::kSilent, kStart).minority == false);
  high.suspected({0}, Cause::kSilent, kStart);
  EXPECT_TRUE(high.tick(kStart + kGrace).minority);
}

TEST(ViewAgreement, AnEvictedRankIsToldWhyAndWhen) {
  auto rank = machine(2, 4);
  ViewReport report = reportOf(1, {.gone = {3}, .settled = {3}, .suspected = {2}});
  report.committed = {2, 3};
  report.accusations[0] = {2, Cause::kSilent, 0};
  const auto actions = rank.received(report, kStart);
  ASSERT_TRUE(actions.evicted);
  EXPECT_EQ(actions.evicted->why, (Accusation{2, Cause::kSilent, 0}));
  EXPECT_EQ(actions.evicted->epoch, 3u);
  EXPECT_EQ(actions.evicted->toldBy, 1);
  EXPECT_FALSE(rank.nextTick());
}

TEST(ViewAgreement, WhoEvictsSaysSoAndAnswersWhoComesBack) {
  auto rank = machine(0, 3);
  rank.suspected({2}, Cause::kSilent, kStart);
  const auto actions = rank.received(reportOf(1, {.suspected = {2}}), kStart);
  ASSERT_TRUE(actions.commit);
  EXPECT_EQ(actions.sendTo, JobRanks{2});
  EXPECT_EQ(rank.report().committed, JobRanks{2});
  const auto back = rank.received(reportOf(2, {.suspected = {0, 1}}), kStart);
  EXPECT_EQ(back.sendTo, JobRanks{2});
  EXPECT_EQ(rank.report().out(), JobRanks{2});
}

// A view that one rank has committed is committed. Rank 3, whose report rank 2 lacks, may never be
// heard again. {1, 2} would be the minority of five ranks. Of the four that are left they are half
// with the lowest.
TEST(ViewAgreement, WhatAnotherCommittedIsCommitted) {
  auto rank = machine(2, 5);
  rank.received(reportOf(1, {.suspected = {0}}), kStart);
  const auto actions = rank.received(reportOf(1, {.suspected = {0}, .committed = {0}}), kStart);
  ASSERT_TRUE(actions.commit);
  EXPECT_EQ(*actions.commit, (View{2, {1, 2, 3, 4}}));
  EXPECT_FALSE(rank.suspected({3, 4}, Cause::kSilent, kStart).minority);
  EXPECT_TRUE(
      rank.received(reportOf(1, {.suspected = {0, 3, 4}, .committed = {0}}), kStart).commit);
}

// ---- a dead rank may have helped another side before it died, so it counts for the quorum

// Four ranks, {0, 3} cut off from {1, 2}. Rank 3 reports that 1 and 2 are out, which lets 0 go on
// as half with the lowest; then it dies. If 1 and 2 did not count it, they would be two of
// three and go on, too.
TEST(ViewAgreement, ADeadRankThatHelpedAnotherSideStillCounts) {
  auto first = machine(0, 4);
  first.suspected({1, 2}, Cause::kSilent, kStart);
  EXPECT_TRUE(first.received(reportOf(3, {.suspected = {1, 2}}), kStart).commit);

  auto second = machine(1, 4);
  second.received(reportOf(3, {.suspected = {1, 2}}), kStart);
  second.exited({3}, LastReport::kReceived, kStart);
  EXPECT_EQ(second.report().gone, JobRanks{3});
  EXPECT_TRUE(second.report().settled.empty());
  second.suspected({0}, Cause::kSilent, kStart);
  EXPECT_TRUE(second.tick(kStart + kGrace).minority);
}

TEST(ViewAgreement, ADeadRankWhoseLastReportIsUnknownStillCounts) {
  auto rank = machine(1, 4);
  rank.exited({3}, LastReport::kUnknown, kStart);
  rank.suspected({0}, Cause::kSilent, kStart);
  EXPECT_TRUE(rank.tick(kStart + kGrace).minority);

  auto knowing = machine(1, 4);
  knowing.exited({3}, LastReport::kUnknown, kStart);
  knowing.exited({3}, LastReport::kReceived, kStart);  // later, from a rank that read it
  knowing.suspected({0}, Cause::kSilent, kStart);
  EXPECT_FALSE(knowing.tick(kStart + kGrace).minority);
}

// Rank 3 accused 0 and died, and we heard that only after we had accused 3 ourselves. As soon as we
// accuse 0, too, it cannot have helped a view that we do not know of.
TEST(ViewAgreement, ADeadRankIsSettledOnceItsLastReportIsPartOfOurs) {
  for (const auto last : {LastReport::kReceived, LastReport::kUnknown}) {
    auto rank = machine(1, 4);
    rank.suspected({3}, Cause::kSilent, kStart);
    rank.received(reportOf(3, {.suspected = {0}}), kStart);
    rank.exited({3}, last, kStart);
    EXPECT_TRUE(rank.report().settled.empty());
    rank.suspected({0}, Cause::kSilent, kStart);
    const auto actions = rank.tick(kStart + kGrace);
    EXPECT_EQ(actions.minority, last == LastReport::kUnknown) << "{1, 2} of {0, 1, 2}";
    if (last == LastReport::kReceived) {
      EXPECT_EQ(rank.report().settled, JobRanks{3});
    }
  }
}

// A death passed on counts as its witness counts it, and only together with the witness'
// suspicions.
TEST(ViewAgreement, ADeathPassedOnIsSettledAsItsWitnessSays) {
  for (const bool settled : {false, true}) {
    auto rank = machine(1, 4);
    Out out{.gone = {3}};
    if (settled) out.settled = {3};
    rank.received(reportOf(2, out), kStart);
    rank.suspected({0}, Cause::kSilent, kStart);
    EXPECT_EQ(rank.tick(kStart + kGrace).minority, !settled);
  }
}

TEST(ViewAgreement, ADeathNeedsNoQuorumWhoeverItHelped) {
  auto rank = machine(1, 2);
  rank.received(reportOf(0, {.suspected = {1}}), kStart);
  EXPECT_TRUE(rank.exited({0}, LastReport::kUnknown, kStart).commit);
}

TEST(ViewAgreement, WhoLeftAfterItWentOnWithoutUsBinds) {
  auto rank = machine(1, 2);
  rank.received(reportOf(0, {.suspected = {1}}), kStart);
  EXPECT_FALSE(rank.left(0, kStart).commit);
  EXPECT_TRUE(rank.tick(kStart + kGrace).minority);
}

// ---- whole jobs

struct Case {
  const char* name;
  int ranks;
  int perHost;
  std::function<void(ViewSim&)> faults;
  JobRanks running;  // in one view, and nobody else in it
  JobRanks minority;
  JobRanks evicted;
};

constexpr Time kThen{1000}, kLater{2000}, kMuchLater{5'000'000};

const Case kCases[] = {
    {"one exit", 4, 4, [](ViewSim& s) { s.killAt(kThen, 2); }, {0, 1, 3}, {}, {}},
    {"rank 0", 4, 4, [](ViewSim& s) { s.killAt(kThen, 0); }, {1, 2, 3}, {}, {}},
    {"one of two", 2, 2, [](ViewSim& s) { s.killAt(kThen, 0); }, {1}, {}, {}},
    {"an exit that only one rank can see", 4, 2, [](ViewSim& s) { s.killAt(kThen, 0); }, {1, 2, 3}},
    {"a goodbye", 3, 1, [](ViewSim& s) { s.leaveAt(kThen, 1); }, {0, 2}, {}, {}},
    {"several at once",
     8,
     8,
     [](ViewSim& s) {
       for (const int r : {0, 1, 2, 4, 6, 7}) s.killAt(kThen, r);
     },
     {3, 5}},
    {"a death during the agreement",
     8,
     8,
     [](ViewSim& s) {
       s.killAt(kThen, 0);
       s.killAt(kThen, 3, 2);  // after the second report about 0
       s.killAt(kThen, 5, 9);
     },
     {1, 2, 4, 6, 7}},
    {"suspicion with a majority",
     3,
     1,
     [](ViewSim& s) { s.stopAt(kThen, 1, kMuchLater); },
     {0, 2},
     {},
     {1}},
    {"half with the lowest",
     4,
     2,
     [](ViewSim& s) {
       s.partitionAt(kThen, {0, 1});
     },
     {0, 1},
     {2, 3}},
    {"two hosts of one rank", 2, 1, [](ViewSim& s) { s.partitionAt(kThen, {0}); }, {0}, {1}},
    {"a minority",
     5,
     1,
     [](ViewSim& s) {
       s.partitionAt(kThen, {0, 1});
     },
     {2, 3, 4},
     {0, 1}},
    {"no side has a majority",
     6,
     1,
     [](ViewSim& s) {
       s.partitionAt(kThen, {0, 1});
       s.partitionAt(kThen, {2, 3});
     },
     {},
     {0, 1, 2, 3, 4, 5}},
    {"one cut link costs one rank",
     4,
     1,
     [](ViewSim& s) {
       s.cutAt(kThen, 0, 3);
       s.cutAt(kThen, 3, 0);
     },
     {0, 1, 2},
     {},
     {3}},
    {"a link cut one way, downwards",
     4,
     1,
     [](ViewSim& s) { s.cutAt(kThen, 3, 0); },
     {0, 1, 2},
     {},
     {3}},
    {"a link cut one way, upwards",
     4,
     1,
     [](ViewSim& s) { s.cutAt(kThen, 0, 3); },
     {1, 2, 3},
     {},
     {0}},
    {"a deaf rank",
     5,
     1,
     [](ViewSim& s) {
       for (const int r : {0, 1, 3, 4}) s.cutAt(kThen, r, 2);
     },
     {0, 1, 3, 4},
     {2}},
    {"a partition that heals in time",
     4,
     1,
     [](ViewSim& s) {
       s.partitionAt(kThen, {0, 1});
       s.partitionAt(Time(900'000), {0, 1}, false);
     },
     {0, 1, 2, 3}},
    {"flapping",
     4,
     1,
     [](ViewSim& s) {
       for (int i = 0; i < 20; ++i) s.partitionAt(Time(300'000 * i), {3}, i % 2 == 0);
     },
     {0, 1, 2, 3}},
    {"a partition that heals too late",
     4,
     1,
     [](ViewSim& s) {
       s.partitionAt(kThen, {0, 1});
       s.partitionAt(kMuchLater, {0, 1}, false);
     },
     {0, 1},
     {2, 3}},
    {"an evicted rank that comes back",
     4,
     4,
     [](ViewSim& s) { s.stopAt(kThen, 0, kMuchLater); },
     {1, 2, 3},
     {},
     {0}},
    // Three hosts; of the live {1, 2, 3} two are a majority, of all four they are not.
    {"an exit while a host is cut off",
     4,
     2,
     [](ViewSim& s) {
       s.killAt(kLater, 0);
       s.stopAt(kThen, 3, kMuchLater);
     },
     {1, 2},
     {},
     {3}},
    {"a false suspicion by one",
     8,
     1,
     [](ViewSim& s) { s.suspectAt(kThen, 7, 2); },
     {0, 1, 3, 4, 5, 6, 7},
     {},
     {2}},
};

TEST(ViewAgreement, NamedCases) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.name);
    ViewSim sim(c.ranks, c.perHost, {}, 1);
    c.faults(sim);
    EXPECT_TRUE(sim.run());
    if (sim.failures().empty()) sim.expectAgreement();
    for (const std::string& failure : sim.failures()) ADD_FAILURE() << failure;
    JobRanks minority, evicted;
    for (int r = 0; r < c.ranks; ++r) {
      if (sim.inMinority(r)) minority.add(r);
      if (sim.evicted(r)) evicted.add(r);
    }
    EXPECT_EQ(ViewSim::text(sim.running()), ViewSim::text(c.running));
    EXPECT_EQ(ViewSim::text(minority), ViewSim::text(c.minority));
    EXPECT_EQ(ViewSim::text(evicted), ViewSim::text(c.evicted));
  }
}

}  // namespace
}  // namespace mooncake
