// The conclusion that all members draw from their reports: docs/membership.md, section 3.
#include "membership/flush.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <random>

namespace mooncake {
namespace {

using AbortReason = FlushReport::AbortReason;

const Error kLost{ErrorCode::kPeerLost, "lost rank 3"};

struct Reporter {
  uint64_t ended;
  bool isOld = false;
  AbortReason abort = AbortReason::kNone;
  std::vector<FailedOperation> failed = {};
  bool hasBegun = true;
  bool wantsToSkip = false;
};

Error whyOf(AbortReason abort, int rank) {
  const std::string text = "of rank " + std::to_string(rank);
  if (abort == AbortReason::kTimeout) return {ErrorCode::kTimeout, text};
  if (abort == AbortReason::kAbort) return {ErrorCode::kAborted, text};
  return {};
}

std::vector<FlushReport> reportsOf(const std::vector<Reporter>& reporters) {
  std::vector<FlushReport> reports;
  for (const auto& [ended, isOld, abort, failed, hasBegun, wantsToSkip] : reporters) {
    const int rank = static_cast<int>(reports.size());
    reports.push_back({.from = rank,
                       .attempt = {1, 0},
                       .ended = ended,
                       .isOld = isOld,
                       .abort = abort,
                       .why = whyOf(abort, rank),
                       .failed = failed,
                       .skipping = {},
                       .stoppedAt = ended + 1,
                       .hasBegun = hasBegun,
                       .wantsToSkip = wantsToSkip});
  }
  return reports;
}

FlushDecision decide(const std::vector<FlushReport>& reports, const Error* lost = nullptr) {
  std::vector<const FlushReport*> pointers;
  for (const FlushReport& report : reports) pointers.push_back(&report);
  return decideFlush(pointers, lost);
}

struct Row {
  const char* what;
  std::vector<Reporter> reporters;
  bool raises;
  uint64_t next;
  ErrorCode code;
  std::string message;
};

TEST(Flush, EndsTheOperationAsTheTableSays) {
  constexpr auto kTimeout = AbortReason::kTimeout, kAbort = AbortReason::kAbort;
  const Row rows[] = {
      {"nothing was wished for", {{4}, {4}, {4}}, false, 5, ErrorCode::kOk, ""},
      {"before the first operation", {{0}, {0}}, false, 1, ErrorCode::kOk, ""},
      {"alone", {{7}}, false, 8, ErrorCode::kOk, ""},
      {"a timeout", {{4}, {4, false, kTimeout}}, false, 5, ErrorCode::kTimeout, "of rank 1"},
      {"the lowest of two timeouts",
       {{4}, {4, false, kTimeout}, {4, false, kTimeout}},
       false,
       5,
       ErrorCode::kTimeout,
       "of rank 1"},
      {"an abort", {{4}, {4}, {4, false, kAbort}}, false, 5, ErrorCode::kAborted, "of rank 2"},
      {"the lowest of two aborts",
       {{4}, {4, false, kAbort}, {4, false, kAbort}},
       false,
       5,
       ErrorCode::kAborted,
       "of rank 1"},
      {"a timeout before an abort",
       {{4, false, kAbort}, {4, false, kTimeout}},
       false,
       5,
       ErrorCode::kTimeout,
       "of rank 1"},
      {"an abort of one behind is void", {{5}, {4, false, kTimeout}}, false, 6, ErrorCode::kOk, ""},
      {"an abort of one behind by two is void",
       {{6, false, AbortReason::kNone, {{6, kLost}}}, {4, false, kAbort}},
       false,
       7,
       ErrorCode::kOk,
       ""},
      {"of two aborts the one that is not void",
       {{4, false, kTimeout}, {5, false, kAbort}},
       false,
       6,
       ErrorCode::kAborted,
       "of rank 1"},
      {"old, but nobody raises", {{4, true}, {4, true}}, false, 5, ErrorCode::kOk, ""},
      {"all old", {{4, true}, {4, true}}, true, 5, ErrorCode::kPeerLost, kLost.message},
      {"one old", {{4, false}, {4, true}}, true, 5, ErrorCode::kPeerLost, kLost.message},
      {"none old any more", {{4}, {4}}, true, 5, ErrorCode::kOk, ""},
      {"only one behind is old", {{5, false}, {4, true}}, true, 6, ErrorCode::kOk, ""},
      {"one that is ahead is old",
       {{5, true}, {4, true}},
       true,
       6,
       ErrorCode::kPeerLost,
       kLost.message},
      {"a timeout does not swallow the loss",
       {{4, true}, {4, true, kTimeout}},
       true,
       5,
       ErrorCode::kPeerLost,
       kLost.message},
      {"the loss was told, the timeout counts",
       {{4, false, kTimeout}, {4}},
       true,
       5,
       ErrorCode::kTimeout,
       "of rank 0"},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.what);
    const auto decision = decide(reportsOf(row.reporters), row.raises ? &kLost : nullptr);
    EXPECT_EQ(decision.next, row.next);
    EXPECT_EQ(decision.error.code, row.code);
    EXPECT_EQ(decision.error.message, row.message);
    const Error* outcome = decision.errorOf(row.next);
    EXPECT_EQ(outcome != nullptr, row.code != ErrorCode::kOk);
    EXPECT_EQ(decision.errorOf(row.next + 1), nullptr);
  }
}

TEST(Flush, WhoIsBehindTakesOverWhatEndedWell) {
  const auto reports = reportsOf({{5}, {4}, {5}});
  const auto decision = decide(reports);
  EXPECT_EQ(decision.endedBy(reports[0]), 5);
  EXPECT_EQ(decision.endedBy(reports[1]), 4);  // so 5, below next, is to be taken over
  EXPECT_EQ(decision.errorOf(5), nullptr);
}

TEST(Flush, WhoIsBehindLearnsOfAnErrorAndNeedsNothing) {
  const Error error{ErrorCode::kMismatch, "different calls"};
  const auto reports = reportsOf({{5, false, AbortReason::kNone, {{5, error}}}, {4}});
  const auto decision = decide(reports);
  EXPECT_EQ(decision.next, 6);
  ASSERT_NE(decision.errorOf(5), nullptr);
  EXPECT_EQ(decision.errorOf(5)->message, error.message);
  EXPECT_EQ(decision.endedBy(reports[1]), 5);
}

TEST(Flush, WhoIsBehindByTwoTakesTheFirstAndLearnsOfTheSecond) {
  const auto reports = reportsOf({{6, false, AbortReason::kNone, {{6, kLost}}}, {4}, {5}});
  const auto decision = decide(reports);
  EXPECT_EQ(decision.next, 7);
  EXPECT_EQ(decision.endedBy(reports[1]), 4);  // 5 ended well
  EXPECT_EQ(decision.endedBy(reports[2]), 6);
  EXPECT_NE(decision.errorOf(6), nullptr);
}

// A rank that is behind ends the operation with the error that it had, and the next one, too.
TEST(Flush, AnErrorOfTheOperationItselfEndsItForThoseBehindToo) {
  const Error error{ErrorCode::kMismatch, "different calls"};
  const auto reports = reportsOf({{5, true, AbortReason::kNone, {{5, error}}}, {4, true}});
  const auto decision = decide(reports, &kLost);
  EXPECT_EQ(decision.next, 6);
  EXPECT_EQ(decision.error.code, ErrorCode::kPeerLost);
  EXPECT_EQ(decision.endedBy(reports[0]), 6);
  EXPECT_EQ(decision.endedBy(reports[1]), 6);
}

TEST(Flush, ErrorsThatAllHaveEndedAreNotToldAgain) {
  const Reporter both{5, false, AbortReason::kNone, {{3, kLost}, {5, kLost}}};
  EXPECT_TRUE(decide(reportsOf({both, both})).failed.empty());
  const auto decision = decide(reportsOf({both, {4, false, AbortReason::kNone, {{3, kLost}}}}));
  ASSERT_EQ(decision.failed.size(), 1u);
  EXPECT_EQ(decision.failed.front().number, 5u);
}

// -- ranks that are left out --

Reporter at(uint64_t number) { return {.ended = number - 1}; }
Reporter wishing(uint64_t number) { return {.ended = number - 1, .wantsToSkip = true}; }
Reporter before(uint64_t number) { return {.ended = number - 1, .hasBegun = false}; }

TEST(Flush, WhoHasNotBegunIsLeftOutWhenSomebodyWishesIt) {
  EXPECT_TRUE(decide(reportsOf({at(5), before(5)})).leftOut.empty());
  EXPECT_EQ(decide(reportsOf({before(5), wishing(5), at(5), before(5)})).leftOut,
            (GroupRanks{0, 3}));
  EXPECT_TRUE(decide(reportsOf({wishing(5), at(5)})).leftOut.empty());
  // Rank 1 lacks only an operation that ended with an error.
  Reporter ahead = wishing(6);
  ahead.failed = {{5, kLost}};
  EXPECT_EQ(decide(reportsOf({ahead, at(5)})).leftOut, GroupRanks{1});
}

TEST(Flush, NobodyIsLeftOutOfWhatEnds) {
  Reporter late = at(5);
  late.abort = AbortReason::kTimeout;
  EXPECT_TRUE(decide(reportsOf({wishing(5), late, before(5)})).leftOut.empty());
  Reporter old = before(5);
  old.isOld = true;
  EXPECT_TRUE(decide(reportsOf({wishing(5), old}), &kLost).leftOut.empty());
}

TEST(Flush, AWishOfOneBehindIsVoid) {
  EXPECT_TRUE(decide(reportsOf({before(6), wishing(5)})).leftOut.empty());
}

TEST(Flush, WhileOneTakesOverNobodyIsLeftOut) {
  EXPECT_TRUE(decide(reportsOf({wishing(6), at(5), before(6)})).leftOut.empty());
  // Rank 1 has taken it over since, and left. Some ranks may have its report only.
  auto reports = reportsOf({wishing(6), before(6), before(6)});
  reports[1].stoppedAt = 5;
  reports[1].hasBegun = true;
  EXPECT_TRUE(decide(reports).leftOut.empty());
}

TEST(Flush, WhoWasLeftOutEndsItWhenAllOthersHave) {
  auto reports = reportsOf({wishing(6), before(5), at(6)});
  auto decision = decide(reports);
  EXPECT_TRUE(decision.isEndedByAll(5));
  EXPECT_EQ(decision.endedBy(reports[1]), 5u);
  EXPECT_EQ(decision.leftOut, GroupRanks{1}) << "of the next one, too";

  reports = reportsOf({at(6), before(5), at(5)});
  decision = decide(reports);
  EXPECT_FALSE(decision.isEndedByAll(5));
  EXPECT_EQ(decision.endedBy(reports[1]), 4u) << "rank 2 is still to take it over";
}

// -- the close of a series

constexpr uint64_t kNext = 7, kOther = 9;  // successors

std::vector<FlushReport> readyOnes(std::vector<FlushReport> reports, uint64_t wish) {
  for (FlushReport& report : reports) report.ready = {kNext, kOther};
  reports.back().wish = wish;
  return reports;
}

TEST(FlushClose, ThePlaceIsBeforeTheNextOperationOrBehindOneThatIsBegunOrFails) {
  const auto closeOf = [](const std::vector<Reporter>& reporters) {
    return decide(readyOnes(reportsOf(reporters), kNext)).close;
  };
  const Reporter idle{.ended = 4, .hasBegun = false};
  EXPECT_EQ(closeOf({idle, idle}), (SeriesClose{kNext, 4}));
  EXPECT_EQ(closeOf({idle, {.ended = 4}}), (SeriesClose{kNext, 5}));
  EXPECT_EQ(closeOf({idle, {.ended = 3}}), (SeriesClose{kNext, 4})) << "begun, but not the next";
  const Reporter fails{.ended = 4, .abort = AbortReason::kTimeout, .hasBegun = false};
  EXPECT_EQ(closeOf({idle, fails}), (SeriesClose{kNext, 5}));
}

TEST(FlushClose, AllMustBeReadyAndOneMustWish) {
  const auto reports = reportsOf({{.ended = 4}, {.ended = 4}, {.ended = 4}});
  EXPECT_FALSE(decide(readyOnes(reports, 0)).close);
  auto one = readyOnes(reports, kNext);
  one[0].ready = {kOther};
  EXPECT_FALSE(decide(one).close);
  one[0].hasLeft = true;
  EXPECT_TRUE(decide(one).close) << "it does not go on";
  one[1].wish = kOther;
  EXPECT_EQ(decide(one).close->successor, kNext) << "the smaller of two";
  one[0].hasLeft = false;
  EXPECT_EQ(decide(one).close->successor, kOther) << "the one for which all are ready";
}

TEST(FlushClose, ADecidedOneStands) {
  auto reports = readyOnes(reportsOf({{.ended = 4}, {.ended = 4}}), kNext);
  reports[0].closing = SeriesClose{kOther, 4};
  EXPECT_EQ(decide(reports).close, (SeriesClose{kOther, 4}));
  for (FlushReport& report : reports) report.ready = {};
  EXPECT_EQ(decide(reports).close, (SeriesClose{kOther, 4}));
}

// Reports come in a different order at every rank, and after different losses.
TEST(Flush, TheOrderOfReportsDoesNotMatter) {
  std::mt19937_64 random(1);
  const auto below = [&](uint64_t end) { return random() % end; };
  for (int round = 0; round < 20'000; ++round) {
    const uint64_t lowest = below(3) * 10;
    std::vector<FailedOperation> failures;  // the same for all ranks that ended the operations
    for (uint64_t number = lowest + 1; number <= lowest + 3; ++number) {
      if (below(2)) failures.push_back({number, {ErrorCode::kMismatch, std::to_string(number)}});
    }
    std::vector<Reporter> reporters(1 + below(5));
    for (Reporter& one : reporters) {
      one = {.ended = lowest + below(4),
             .isOld = below(2) == 0,
             .abort = static_cast<AbortReason>(below(3)),
             .hasBegun = below(2) == 0,
             .wantsToSkip = below(2) == 0};
      for (const auto& failure : failures) {
        if (failure.number <= one.ended) one.failed.push_back(failure);
      }
    }
    auto reports = reportsOf(reporters);
    for (FlushReport& report : reports) {
      if (below(4)) report.ready = {kNext};
      if (below(3)) report.ready.push_back(kOther);
      report.wish = below(2) ? 0 : below(2) ? kNext : kOther;
      report.hasLeft = below(8) == 0;
      if (below(16) == 0) report.closing = SeriesClose{kOther, 40};
    }
    const Error* lost = below(2) ? &kLost : nullptr;
    const FlushDecision first = decide(reports, lost);
    std::shuffle(reports.begin(), reports.end(), random);
    const FlushDecision second = decide(reports, lost);
    ASSERT_EQ(first.next, second.next);
    ASSERT_EQ(first.error.code, second.error.code);
    ASSERT_EQ(first.error.message, second.error.message);
    ASSERT_EQ(first.leftOut, second.leftOut);
    ASSERT_EQ(first.close, second.close);
    ASSERT_EQ(first.failed.size(), second.failed.size());
    for (size_t i = 0; i < first.failed.size(); ++i) {
      ASSERT_EQ(first.failed[i].number, second.failed[i].number);
      ASSERT_EQ(first.failed[i].error.message, second.failed[i].error.message);
    }
    for (const FlushReport& report : reports) {
      ASSERT_EQ(first.endedBy(report), second.endedBy(report));
      ASSERT_GE(first.endedBy(report), report.ended);
      ASSERT_LE(first.endedBy(report), first.next);
    }
  }
}

// -- the wire form --

FlushReport someReport() {
  return {.from = 2,
          .attempt = {3, 7},
          .ended = 41,
          .isOld = true,
          .abort = AbortReason::kAbort,
          .why = {ErrorCode::kExhausted, "no memory"},
          .failed = {{38, {ErrorCode::kTimeout, "late"}}, {41, kLost}},
          .skipping = {{39, {0, 3}, {1}}, {40, {2}, {}}},
          .stoppedAt = 42,
          .hasBegun = true,
          .wantsToSkip = true,
          .ready = {5, ~uint64_t(0)},
          .wish = 5,
          .closing = SeriesClose{6, 43}};
}

Result<FlushReport> decode(const Bytes& bytes, int size = 4) {
  ByteReader in(bytes);
  return decodeFlushReport(in, size);
}

void expectRefused(const FlushReport& report, int size = 4) {
  const auto decoded = decode(encodeFlushReport(report), size);
  ASSERT_FALSE(decoded.ok());
  EXPECT_EQ(decoded.error().code, ErrorCode::kProtocol);
}

TEST(FlushReport, ComesBackAsItWas) {
  for (const bool isPlain : {false, true}) {
    const FlushReport sent = isPlain ? FlushReport{.from = 0, .attempt = {}} : someReport();
    const auto decoded = decode(encodeFlushReport(sent));
    ASSERT_TRUE(decoded.ok()) << decoded.error().message;
    EXPECT_EQ(decoded->from, sent.from);
    EXPECT_EQ(decoded->attempt, sent.attempt);
    EXPECT_EQ(decoded->ended, sent.ended);
    EXPECT_EQ(decoded->isOld, sent.isOld);
    EXPECT_EQ(decoded->abort, sent.abort);
    EXPECT_EQ(decoded->why.code, sent.why.code);
    EXPECT_EQ(decoded->why.message, sent.why.message);
    ASSERT_EQ(decoded->failed.size(), sent.failed.size());
    for (size_t i = 0; i < sent.failed.size(); ++i) {
      EXPECT_EQ(decoded->failed[i].number, sent.failed[i].number);
      EXPECT_EQ(decoded->failed[i].error.code, sent.failed[i].error.code);
      EXPECT_EQ(decoded->failed[i].error.message, sent.failed[i].error.message);
    }
    EXPECT_EQ(decoded->stoppedAt, sent.stoppedAt);
    EXPECT_EQ(decoded->hasBegun, sent.hasBegun);
    EXPECT_EQ(decoded->wantsToSkip, sent.wantsToSkip);
    EXPECT_EQ(decoded->ready, sent.ready);
    EXPECT_EQ(decoded->wish, sent.wish);
    EXPECT_EQ(decoded->closing, sent.closing);
    EXPECT_FALSE(decoded->hasLeft);
    ASSERT_EQ(decoded->skipping.size(), sent.skipping.size());
    for (size_t i = 0; i < sent.skipping.size(); ++i) {
      EXPECT_EQ(decoded->skipping[i].number, sent.skipping[i].number);
      EXPECT_EQ(decoded->skipping[i].contributors, sent.skipping[i].contributors);
      EXPECT_EQ(decoded->skipping[i].skipped, sent.skipping[i].skipped);
    }
  }
}

TEST(FlushReport, FitsAMessageAtItsLargest) {
  FlushReport report = someReport();
  report.why.message.assign(10'000, 'x');
  report.failed.clear();
  for (uint64_t number = 1; number <= kRemembered; ++number)
    report.failed.push_back({number, {ErrorCode::kTimeout, std::string(10'000, 'y')}});
  const Bytes bytes = encodeFlushReport(report);
  EXPECT_LT(bytes.size(), size_t(60) << 10);
  const auto decoded = decode(bytes);
  ASSERT_TRUE(decoded.ok()) << decoded.error().message;
  EXPECT_EQ(decoded->failed.size(), kRemembered);
}

TEST(FlushReport, IsRefusedWhenAFieldMakesNoSense) {
  FlushReport report = someReport();
  expectRefused(report, 2);   // no such rank
  report.attempt.losses = 5;  // as many as there are ranks
  expectRefused(report, 5);

  report = someReport();
  report.ended = 40;  // and yet 41 failed
  expectRefused(report);
  report.ended = ~uint64_t(0);
  expectRefused(report);

  report = someReport();
  report.abort = static_cast<AbortReason>(3);
  expectRefused(report);
  report.abort = AbortReason::kNone;  // but there is a reason
  expectRefused(report);
  report = someReport();
  report.why = {};  // none for the abort
  expectRefused(report);

  report = someReport();
  std::swap(report.failed[0], report.failed[1]);
  expectRefused(report);
  report.failed[0].number = report.failed[1].number;
  expectRefused(report);
  report = someReport();
  report.failed[0].error = {};  // ended well
  expectRefused(report);
  report = someReport();
  report.ended = 100;
  report.failed.clear();
  for (uint64_t number = 1; number <= kRemembered + 1; ++number)
    report.failed.push_back({number, kLost});
  expectRefused(report);

  report = someReport();
  report.stoppedAt = 43;  // later than any operation that it can be in
  expectRefused(report);
  report.stoppedAt = 0;
  expectRefused(report);
  report = someReport();
  report.hasBegun = false;  // but wishes to skip others in it
  expectRefused(report);
  report = someReport();
  report.skipping.back().number = 42;  // which it has not ended
  expectRefused(report);
  report = someReport();
  report.skipping.back().contributors = {4};  // no such rank
  expectRefused(report);
  report = someReport();
  report.skipping.back().skipped = {4};
  expectRefused(report);
  report = someReport();
  report.skipping.resize(kRememberedSkips + 1, {1, {0}, {1}});
  expectRefused(report);

  report = someReport();
  report.ready = {1, 2, 3};  // more than a rank prepares
  expectRefused(report);
  report.ready = {2, 1};
  expectRefused(report);
  report.ready = {2, 2};
  expectRefused(report);
  report.ready = {0};  // no digest
  expectRefused(report);
  report = someReport();
  report.closing = SeriesClose{0, 43};
  expectRefused(report);
  report.closing = SeriesClose{6, ~uint64_t(0)};
  expectRefused(report);
}

TEST(FlushMessage, SaysWhatItsSenderHasPrepared) {
  const FlushMessage sent{.kind = FlushMessage::Kind::kEnded, .ended = 3, .ready = {4, 8}};
  const auto decoded = decodeFlushMessage(encodeFlushMessage(sent), 4);
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded->ready, sent.ready);
  FlushMessage wrong = sent;
  wrong.ready = {8, 4};
  EXPECT_FALSE(decodeFlushMessage(encodeFlushMessage(wrong), 4).ok());
  wrong.ready.assign(200, 8);
  EXPECT_FALSE(decodeFlushMessage(encodeFlushMessage(wrong), 4).ok());
}

TEST(FlushReport, IsRefusedWhenCutOrLonger) {
  const Bytes whole = encodeFlushReport(someReport());
  for (size_t length = 0; length < whole.size(); ++length)
    EXPECT_FALSE(decode(Bytes(whole.begin(), whole.begin() + ptrdiff_t(length))).ok()) << length;
  Bytes longer = whole;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(decode(longer).ok());
}

TEST(FlushReport, AnyBytesAreReadWithoutHarm) {
  const Bytes whole = encodeFlushReport(someReport());
  std::mt19937_64 random(2);
  for (int round = 0; round < 50'000; ++round) {
    Bytes bytes = whole;
    for (uint64_t i = 1 + random() % 4; i > 0; --i)
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    const auto decoded = decode(bytes);
    if (!decoded.ok()) continue;
    const FlushReport& report = *decoded;
    EXPECT_LT(report.from, 4);
    EXPECT_LE(report.failed.size(), kRemembered);
    for (const auto& one : report.failed) EXPECT_LE(one.number, report.ended);
    EXPECT_LE(report.ready.size(), kMostSuccessors);
    (void)decide({report});
  }
}

// A newer version's code is an error all the same.
TEST(FlushReport, AnUnknownErrorStaysAnError) {
  FlushReport report = someReport();
  report.why.code = static_cast<ErrorCode>(200);
  const auto decoded = decode(encodeFlushReport(report));
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded->why.code, ErrorCode::kProtocol);
}

}  // namespace
}  // namespace mooncake
