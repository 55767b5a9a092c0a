#include <chrono>
#include <cstdio>
#include <gtest/gtest.h>

#include "view_sim.h"

// Measures the cost of an agreement. For the table:
// --gtest_also_run_disabled_tests --gtest_filter=ViewCost.*
namespace mooncake {
namespace {

using Time = ViewSim::Time;

struct Cost {
  double messages;  // sent by a survivor
  double bytes;     // sent by a survivor
  double rounds;    // rounds of messages, until the last rank has committed
  double cpu;       // milliseconds of a survivor
};

// All exits happen at one instant. Ranks of the same host see them at once, others hear of them.
Cost costOf(int ranks, int perHost, int exits, bool gathers) {
  constexpr Time kExit{10'000}, kOneRound{1000};
  ViewSim::Network network{.minDelay = kOneRound, .maxDelay = kOneRound};
  network.witnessDelay = Time(0);
  network.lateWitness = 0;
  if (gathers) network.gathers = Time(1);
  ViewSim sim(ranks, perHost, network, 1);
  for (int i = 0; i < exits; ++i) sim.killAt(kExit, i * (ranks / exits));
  const auto start = std::chrono::steady_clock::now();
  EXPECT_TRUE(sim.run());
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  sim.expectAgreement();
  for (const std::string& failure : sim.failures()) ADD_FAILURE() << failure;
  const int survivors = ranks - exits;
  EXPECT_EQ(sim.running().count(), survivors);
  return {.messages = static_cast<double>(sim.messages()) / survivors,
          .bytes = static_cast<double>(sim.bytes()) / survivors,
          .rounds = static_cast<double>((sim.lastCommit() - kExit) / kOneRound),
          .cpu = took.count() / survivors};
}

TEST(ViewCost, AnExitCostsEachSurvivorOneReportToEachOther) {
  const Cost host = costOf(16, 16, 1, false);
  EXPECT_EQ(host.messages, 14);
  EXPECT_EQ(host.rounds, 1);
  const Cost hosts = costOf(16, 4, 1, false);
  EXPECT_EQ(hosts.messages, 14);
  EXPECT_EQ(hosts.rounds, 2);
}

TEST(ViewCost, ExitsAtOnceCostAsMuchAsOneWhereReportsAreGathered) {
  EXPECT_EQ(costOf(16, 16, 8, true).messages, 7);
  EXPECT_LE(costOf(16, 4, 4, true).messages, 14 + 11) << "the first, and what came of all of them";
}

TEST(ViewCost, DISABLED_Table) {
  std::printf("%6s %9s %6s %8s | %9s %10s %7s %8s\n", "ranks", "per host", "exits", "gathers",
              "messages", "bytes", "rounds", "cpu ms");
  for (const int ranks : {8, 64, 512, 1024}) {
    for (const int exits : {1, 8}) {
      for (const bool gathers : {false, true}) {
        if (exits == ranks) continue;
        const Cost cost = costOf(ranks, 8, exits, gathers);
        std::printf("%6d %9d %6d %8s | %9.0f %10.0f %7.0f %8.2f\n", ranks, 8, exits,
                    gathers ? "yes" : "no", cost.messages, cost.bytes, cost.rounds, cost.cpu);
      }
    }
  }
}

// 4096 machines do not fit in memory. One of them runs, and receives the reports of all others.
TEST(ViewCost, DISABLED_OneOf4096) {
  constexpr int kRanks = JobRanks::kLimit;
  for (const int exits : {1, 8}) {
    JobRanks dead;
    for (int i = 1; i <= exits; ++i) dead.add(i * (kRanks / exits) - 1);
    ViewAgreement rank(0, {1, JobRanks::firstRanks(kRanks)}, ViewSim::kTiming);
    const auto start = std::chrono::steady_clock::now();
    auto actions = rank.exited(dead, ViewAgreement::LastReport::kReceived, {});
    const Bytes report = encodeViewReport(rank.report());
    const JobRanks others = actions.sendTo;
    others.forEach([&](int r) {
      auto theirs = decodeViewReport(report, kRanks);
      theirs->from = r;
      actions = rank.received(*theirs, {});
    });
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    ASSERT_TRUE(actions.commit);
    std::printf("%6d ranks %2d exits | %9d messages %10zu bytes (%zu each) %8.2f ms cpu\n", kRanks,
                exits, others.count(), others.count() * report.size(), report.size(), took.count());
  }
}

}  // namespace
}  // namespace mooncake
