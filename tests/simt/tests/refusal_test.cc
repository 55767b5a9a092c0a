#include <gtest/gtest.h>
#include <string>

#include "kernels/collectives.cuh"
#include "kernels/two_kernels.cuh"
#include "races.h"
#include "virtual_group.h"

// Hosts end a group at any moment: kernels wait for ranks or for a decision, are held up at their
// begin, or are still in their queue.
namespace mooncake::kernels {
namespace {

constexpr int kRanks = 3;
constexpr unsigned kOperations = 5;
constexpr uint64_t kPatienceNs[] = {2'000'000, 300'000'000};
// When all hosts have refused, or so early that a host may have stopped the kernels meanwhile.
constexpr uint64_t kLateNs[] = {70'000'000, 7'000'000};

constexpr auto kSend = [](const Exchange& exchange) {
  sendAll(
      exchange, [](unsigned char*, unsigned) {}, [](Pushes&, unsigned) {});
};
constexpr auto kReceive = [](const Exchange& exchange) {
  receiveAll(
      exchange, [](const Turn&) {}, [](const GroupState&, const Turn&, unsigned) {},
      [](const Turn&) { return true; });
};

// `ended`: counts ranks whose group ended before their last operation.
void refuse(GroupShape shape, unsigned& ended) {
  const unsigned races = simt::racesReported();
  for (uint64_t seed = 1; seed <= (simt::kFindsRaces ? 20 : 100); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    simt::World world({.seed = seed});
    shape.seed = seed;
    shape.patienceNs = kPatienceNs[seed % 2];
    VirtualGroup group(world, shape);
    Exchange exchange{};
    exchange.call = 1;
    exchange.root = -1;
    exchange.pieces = 1;
    exchange.readers = Readers::kOwnPart;
    const uint64_t late = kLateNs[seed / 2 % 2];
    for (int rank = 0; rank < kRanks; ++rank) {
      for (unsigned i = 0; i < kOperations; ++i) {
        // A rank is late, if not in any operation.
        if (unsigned(rank) == seed % kRanks && i == seed / kRanks % (kOperations + 1))
          group.run(rank, "late", [late] {
            for (const uint64_t since = now(); now() < since + late;) relax();
          });
        group.callInTwo(rank, "operation", exchange, 0, kSend, kReceive);
      }
    }
    group.start();
    const simt::Report report = world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    // None waits for a decision in vain, nor until it loses patience.
    EXPECT_LT(report.virtualNs, 3 * kLateNs[0]);
    for (int rank = 0; rank < kRanks; ++rank) {
      const GroupState& state = group.state(rank);
      EXPECT_EQ(state.entered, 0u);
      EXPECT_EQ(group.host(rank).failed, state.failed);
      if (state.failed || state.done < kOperations)
        EXPECT_EQ(Failure(state.failed), Failure::kRefused);
      ended += state.done < kOperations;
    }
    if (::testing::Test::HasFailure()) return;
    ASSERT_EQ(simt::racesReported(), races);
  }
}

void refuseAll(GroupShape shape) {
  unsigned ended = 0;
  shape.ranks = kRanks;
  shape.banks = 2;
  shape.hosts = Hosts::kRefuseAnyTime;
  refuse(shape, ended);
  EXPECT_GT(ended, 0u);
}

TEST(Refusal, OfCalls) { refuseAll({}); }
TEST(Refusal, OfCallsOnTwoHosts) { refuseAll({.hostOf = {0, 1, 1}}); }
TEST(Refusal, OfReplays) { refuseAll({.ofGraphs = true}); }
TEST(Refusal, OfCallsThatSkipLateRanks) { refuseAll({.skipNs = 5'000'000}); }

}  // namespace
}  // namespace mooncake::kernels
