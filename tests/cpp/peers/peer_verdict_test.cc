#include "peers/peer_verdict.h"

#include <gtest/gtest.h>
#include <vector>

namespace mooncake {
namespace {

using kernels::Decision;

constexpr unsigned kBanks = 3;

// A rank that has stopped in this operation, of one exchange.
PeerReport stoppedIn(uint64_t number) {
  return {.done = number - 1, .stoppedAt = number, .ended = number - 1, .taken = number};
}

// Between two operations.
PeerReport endedAll(uint64_t number) {
  return {.done = number, .stoppedAt = number, .ended = number, .taken = number};
}

std::vector<PeerVerdict> verdicts(uint64_t active, const std::vector<PeerReport>& reports,
                                  unsigned banks = kBanks) {
  std::vector<PeerVerdict> all;
  for (size_t rank = 0; rank < reports.size(); ++rank)
    all.push_back(verdictFor(int(rank), active, reports, banks));
  return all;
}

TEST(PeerVerdict, OperationStartsAgainWithoutALostRank) {
  const auto all = verdicts(0b101, {stoppedIn(5), endedAll(9), stoppedIn(5)});
  for (const int rank : {0, 2}) {
    const PeerVerdict& verdict = all[size_t(rank)];
    EXPECT_EQ(verdict.decision, Decision::kGoOn);
    EXPECT_EQ(verdict.active, 0b101u);
    EXPECT_EQ(verdict.partial, 5u);
    EXPECT_EQ(verdict.among, 0b101u);
    EXPECT_EQ(verdict.skipped, 0u);
    // Exchange 5 was begun, and the next one follows exchange 4 in the banks.
    EXPECT_GE(verdict.serial, 5u);
    EXPECT_EQ(kernels::bankOf(verdict.serial, kBanks), kernels::bankOf(4, kBanks));
  }
}

TEST(PeerVerdict, RanksTakeAnOperationThatAnotherHasEnded) {
  const auto all = verdicts(0b111, {stoppedIn(5), endedAll(5), stoppedIn(6)});
  EXPECT_EQ(all[0].decision, Decision::kTake);
  EXPECT_EQ(all[1].decision, Decision::kGoOn);
  EXPECT_EQ(all[2].decision, Decision::kGoOn);
  for (const PeerVerdict& verdict : all) {
    EXPECT_EQ(verdict.partial, 6u);
    EXPECT_EQ(verdict.serial, all[0].serial);
    EXPECT_EQ(kernels::bankOf(verdict.serial, kBanks), kernels::bankOf(5, kBanks));
  }
}

TEST(PeerVerdict, BankOfAnExchangeThatAllHaveIsNotTheNext) {
  // Some rank has ended two exchanges more of an operation that starts again.
  std::vector<PeerReport> reports{stoppedIn(5), stoppedIn(5)};
  reports[0].taken = 8;
  reports[1].hadAll = 6;
  for (const unsigned banks : {2u, 3u}) {
    for (const PeerVerdict& verdict : verdicts(0b11, reports, banks)) {
      EXPECT_GE(verdict.serial, 8u);
      EXPECT_EQ(kernels::bankOf(verdict.serial, banks), kernels::bankOf(6, banks));
    }
  }
}

TEST(PeerVerdict, SkipsRanksThatHaveNotBegun) {
  std::vector<PeerReport> reports{stoppedIn(5), endedAll(4), stoppedIn(5), endedAll(4)};
  reports[2].late = 5;
  const auto all = verdicts(0b1111, reports, 2);
  for (const PeerVerdict& verdict : all) {
    EXPECT_EQ(verdict.decision, Decision::kGoOn);
    EXPECT_EQ(verdict.active, 0b1111u);  // later operations wait for them again
    EXPECT_EQ(verdict.partial, 5u);
    EXPECT_EQ(verdict.among, 0b101u);
  }
  EXPECT_EQ(all[0].skipped, 0u);
  EXPECT_EQ(all[1].skipped, 5u);
  EXPECT_EQ(all[2].skipped, 0u);
  EXPECT_EQ(all[3].skipped, 5u);
}

TEST(PeerVerdict, NoneIsSkippedWhileAnotherIsBehind) {
  // Rank 1 still lacks operation 5, which rank 0 has ended: it takes that first.
  std::vector<PeerReport> reports{stoppedIn(6), stoppedIn(5)};
  reports[0].late = 6;
  const auto all = verdicts(0b11, reports, 2);
  EXPECT_EQ(all[0].decision, Decision::kGoOn);
  EXPECT_EQ(all[1].decision, Decision::kTake);
  EXPECT_EQ(all[0].among, 0b11u);
  EXPECT_EQ(all[1].skipped, 0u);
}

TEST(PeerVerdict, LateReportOfAnEarlierOperationSkipsNobody) {
  std::vector<PeerReport> reports{stoppedIn(5), endedAll(4)};
  reports[0].late = 4;
  for (const PeerVerdict& verdict : verdicts(0b11, reports, 2)) EXPECT_EQ(verdict.among, 0b11u);
}

TEST(PeerVerdict, SkippedRankStaysSkippedUntilItHasCome) {
  // Operation 5 was decided without rank 1. Rank 0 has ended it and waits in 6, rank 1 is at 4.
  std::vector<PeerReport> reports{stoppedIn(6), endedAll(4)};
  reports[1].skipped = 5;
  const auto all = verdicts(0b11, reports, 2);
  EXPECT_EQ(all[0].decision, Decision::kGoOn);
  EXPECT_EQ(all[1].decision, Decision::kGoOn);
  EXPECT_EQ(all[1].skipped, 5u);
  EXPECT_EQ(all[0].partial, 6u);
  EXPECT_EQ(all[0].among, 0b11u);
  // Rank 1 counts one more exchange, that of operation 5, before both do operation 6.
  EXPECT_EQ(all[1].serial + 1, all[0].serial);
}

TEST(PeerVerdict, SkippedRankThatHasPassedAnOperationHasNoDataOfIt) {
  // Ranks 0 and 2 do operation 5 without rank 1, whose kernel has passed it at once. Rank 2 is gone.
  std::vector<PeerReport> reports{stoppedIn(5), endedAll(5), stoppedIn(5)};
  reports[1].skipped = 5;
  const auto all = verdicts(0b011, reports, 2);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(all[size_t(rank)].decision, Decision::kGoOn);
    EXPECT_EQ(all[size_t(rank)].partial, 5u);
    EXPECT_EQ(all[size_t(rank)].among, 0b001u);
  }
  EXPECT_EQ(all[1].skipped, 5u);
  // Rank 1 has counted the exchange of operation 5.
  EXPECT_EQ(all[1].serial, all[0].serial + 1);
}

TEST(PeerVerdict, SkippedRanksEndAnOperationWhenTheOthersAreLost) {
  // Ranks 1 and 2 were skipped in operation 5. The others have gone with its result.
  std::vector<PeerReport> reports{stoppedIn(6), endedAll(4), endedAll(4)};
  reports[1].skipped = reports[2].skipped = 5;
  const auto all = verdicts(0b110, reports, 2);
  for (const int rank : {1, 2}) {
    EXPECT_EQ(all[size_t(rank)].decision, Decision::kGoOn);
    EXPECT_EQ(all[size_t(rank)].partial, 6u);
    EXPECT_EQ(all[size_t(rank)].among, 0b110u);
    EXPECT_EQ(all[size_t(rank)].skipped, 5u);
    EXPECT_EQ(all[size_t(rank)].serial, all[1].serial);
  }
}

TEST(PeerVerdict, SerialNumbersDoNotFallWhenTheOthersAreLost) {
  // Rank 0 did operations 1 to 3 without rank 1, and is gone. Rank 1 has since come to the end of
  // operation 1, in exchange 7.
  const std::vector<PeerReport> reports{
      stoppedIn(4), {.done = 1, .stoppedAt = 1, .ended = 7, .taken = 7, .skipped = 3}};
  const PeerVerdict verdict = verdictFor(1, 0b10, reports, 2);
  EXPECT_EQ(verdict.decision, Decision::kGoOn);
  EXPECT_EQ(verdict.partial, 4u);
  EXPECT_EQ(verdict.skipped, 3u);
  EXPECT_GE(verdict.serial, 7u);
}

TEST(PeerVerdict, TellsWhetherItSkips) {
  std::vector<PeerReport> reports{stoppedIn(5), endedAll(4)};
  EXPECT_FALSE(verdicts(0b11, reports, 2)[0].skips);
  reports[0].late = 5;
  EXPECT_TRUE(verdicts(0b11, reports, 2)[0].skips);
}

}  // namespace
}  // namespace mooncake
