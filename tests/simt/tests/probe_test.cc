#include "kernels/probe.cuh"

#include <gtest/gtest.h>
#include <vector>

#include "tests/simt/world.h"

namespace mooncake::simt {
namespace {

TEST(ProbeTest, EachThreadWritesItsWord) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    std::vector<uint32_t> words(200, 7);
    const auto value = static_cast<uint32_t>(seed * 1000);
    const kernels::ProbeArguments arguments{.out = words.data(), .count = 150, .value = value};
    World world({.seed = seed});
    world.launch(0, 0, "probe", {3}, {64}, 0, [&] { mooncake_probe(arguments); });
    const Report report = world.run();
    EXPECT_TRUE(report.ok) << report.problem;
    for (uint32_t i = 0; i < 200; ++i) EXPECT_EQ(words[i], i < 150 ? value + i : 7) << i;
  }
}

}  // namespace
}  // namespace mooncake::simt
