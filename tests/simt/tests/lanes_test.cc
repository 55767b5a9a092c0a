#include <gtest/gtest.h>
#include <vector>

#include "kernels/ep/dispatch.cuh"
#include "kernels/ep/dispatch_tokens.cuh"
#include "races.h"
#include "tests/simt/world.h"

// A rank that the others go on without reads the sizes of an operation while their owner writes those
// of another one. The lanes of a warp meet equally often all the same.
namespace mooncake::kernels {
namespace {

constexpr unsigned kTokens = 16, kChoices = 2;

// `take(state, turn)` takes rows of a rank that has none for this one.
template <typename Take>
void takeWhileSizesChange(const Take& take) {
  if (simt::kFindsRaces) GTEST_SKIP() << "the reads race";
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    simt::World world({.seed = seed});
    GroupState state;
    state.ranks = 1;
    state.bankBytes = 2048;
    std::vector<unsigned char> banks(state.banks * state.bankBytes, 0xff);
    state.data[0] = banks.data();
    auto& sizes = *reinterpret_cast<RowsHeader*>(banks.data());
    sizes.tokens = kTokens;
    sizes.topk = kChoices;
    const Turn turn{0, 0, 1, 1, state.data};
    world.own(0, banks.data(), banks.size());
    world.launch(0, 0, "reader", {1}, {kLanes}, 0, [&] { take(state, turn); });
    world.launch(0, 1, "owner", {1}, {1}, 0, [&] {
      for (unsigned i = 0; i < 100; ++i) storeRelaxedSystem(&sizes.tokens, i % 2 ? kTokens : 0);
    });
    const simt::Report report = world.run();
    ASSERT_TRUE(report.ok) << report.problem;
  }
}

TEST(Lanes, AgreeOnSizesOfRows) {
  DispatchReceive a{};
  a.call.maxTokens = kTokens;
  a.call.experts = 1;
  a.call.rowBytes = 16;
  takeWhileSizesChange(
      [&](const GroupState& state, const Turn& turn) { takeRows(a, state, turn, 1, 0, 0, 0); });
}

TEST(Lanes, AgreeOnSizesOfTokens) {
  DispatchTokens a{};
  a.call.step = kTokens;
  a.call.width = kChoices;
  a.call.rowBytes = 16;
  const Arrivals none{};
  takeWhileSizesChange([&](const GroupState& state, const Turn& turn) {
    takeTokens(a, state, turn, none, 0, 0, 0);
  });
}

}  // namespace
}  // namespace mooncake::kernels
