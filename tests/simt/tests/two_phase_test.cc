#include <gtest/gtest.h>
#include <vector>

#include "kernels/two_kernels.cuh"
#include "races.h"
#include "virtual_group.h"

namespace mooncake::kernels {
namespace {

constexpr auto kSend = [](const Exchange& exchange) {
  const auto write = [](unsigned char* own, unsigned block) {
    if (threadIdx.x == 0) own[block] = 1;
  };
  sendAll(exchange, write,
          [](Pushes& pushes, unsigned block) { push(pushes, block, block, lane() == 0 ? 1 : 0); });
};
constexpr auto kReceive = [](const Exchange& exchange) {
  receiveAll(
      exchange, [](const Turn&) {}, [](const GroupState&, const Turn&, unsigned) {},
      [](const Turn&) { return true; });
};

// A program sends twice and receives then: the second kernel would overwrite published data. It fails
// the group instead, later operations end at once, and nothing holds up the hosts' stops.
void sendTwice(bool ofGraphs, std::vector<int> hosts = {}) {
  const unsigned races = simt::racesReported();
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    simt::World world({.seed = seed});
    VirtualGroup group(
        world, {.ranks = 3, .banks = 2, .ofGraphs = ofGraphs, .hostOf = hosts, .seed = seed});
    Exchange exchange{};
    exchange.call = 1;
    exchange.root = -1;
    exchange.pieces = 1;
    exchange.readers = Readers::kOwnPart;
    for (int rank = 0; rank < 3; ++rank) {
      group.callInTwo(rank, "first", exchange, 0, kSend, kReceive);
      group.call(rank, "second sends", exchange, kSend);
      group.call(rank, "third sends", exchange, kSend);
      group.call(rank, "third receives", exchange, kReceive);
      group.call(rank, "second receives", exchange, kReceive);
      group.callInTwo(rank, "fourth", exchange, 0, kSend, kReceive);
    }
    group.start();
    const simt::Report report = world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(Failure(group.state(rank).failed), Failure::kUnreceived);
      EXPECT_EQ(group.state(rank).done, 1u);
      EXPECT_EQ(group.state(rank).entered, 0u);
    }
    ASSERT_EQ(simt::racesReported(), races);
  }
}

TEST(TwoPhases, ASecondSendFailsTheGroup) { sendTwice(false); }
TEST(TwoPhases, ASecondSendOfAGraphFailsTheGroup) { sendTwice(true); }
TEST(TwoPhases, ASecondSendFailsAGroupOnTwoHosts) { sendTwice(false, {0, 1, 1}); }

}  // namespace
}  // namespace mooncake::kernels
