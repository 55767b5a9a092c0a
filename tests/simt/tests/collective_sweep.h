#pragma once

#include <cstdlib>
#include <deque>
#include <gtest/gtest.h>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "collective_program.h"
#include "races.h"
#include "virtual_group.h"

namespace mooncake::kernels {

using simt::kFindsRaces;
using simt::racesReported;
using simt::Report;
using simt::World;

inline constexpr uint64_t kSeeds = kFindsRaces ? 6 : 60;

inline uint64_t seedsOf(uint64_t usual) {
  const char* const factor = std::getenv("MOONCAKE_SIMT_SEEDS");
  return factor ? usual * uint64_t(std::atoi(factor)) : usual;
}

// Numbers of 32 bits would wrap, or would be more than half of their range ahead of old signals.
inline constexpr uint64_t kEnded[] = {0, 0, (uint64_t(1) << 31) + 5, (uint64_t(1) << 32) - 2};

struct Swept {
  unsigned wentOn = 0, took = 0;  // decisions of hosts
  unsigned withoutRoot = 0;       // calls
};

// The verb of all rounds of a seed's program. Returns nothing if they differ.
using OnlyVerb = std::optional<Verb> (*)(uint64_t seed);
inline constexpr OnlyVerb kAnyVerb = [](uint64_t) { return std::optional<Verb>(); };
inline constexpr OnlyVerb kTwoShotVerb = [](uint64_t seed) {
  return std::optional(seed % 2 ? Verb::kTwoShot : Verb::kTwoShotInPlace);
};

// Draws programs by seeds and checks each. `disturb` may kill and stop ranks.
template <typename Disturb>
void sweep(int ranks, uint64_t seeds, Disturb disturb, Swept* swept = nullptr,
           bool ofGraphs = false, OnlyVerb only = kAnyVerb, const std::vector<int>& hosts = {}) {
  const unsigned races = racesReported();
  for (uint64_t seed = 1; seed <= seedsOf(seeds); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    World world({.seed = seed, .starveFor = seed % 3 ? 16u : 0u});
    Case drawn(seed, ranks);
    VirtualGroup group(world, {.ranks = ranks,
                               .blocks = drawn.blocks,
                               .threads = drawn.threads,
                               .bankBytes = 4 * size_t(ranks) * (drawn.piece ? drawn.piece : 400),
                               .ended = kEnded[seed % std::size(kEnded)],
                               .ofGraphs = ofGraphs,
                               .callsEach = unsigned(seed % 4),
                               .hostOf = hosts,
                               .seed = seed});
    Program program(world, group, drawn, only(seed));
    disturb(world, group, drawn);
    group.start();
    const Report report = world.run();
    ASSERT_TRUE(report.ok) << report.problem;
    program.check();
    group.checkPushes();
    group.checkChanges();
    if (::testing::Test::HasFailure()) return;
    if (swept) {
      swept->wentOn += group.decided(Decision::kGoOn);
      swept->took += group.decided(Decision::kTake);
      swept->withoutRoot += program.withoutRoot();
    }
    ASSERT_EQ(racesReported(), races);
  }
}

inline constexpr auto kNothing = [](World&, VirtualGroup&, Case&) {};

// A group whose second rank does not take part as it should.
struct Disturbed {
  Disturbed(Hosts hosts, uint64_t seed, const std::vector<int>& hostOf = {},
            uint64_t decisionNs = 90'000'000)
      : world({.seed = seed}),
        group(world, {.ranks = 3,
                      .hosts = hosts,
                      .decisionNs = decisionNs,
                      .hostOf = hostOf,
                      .seed = seed}) {}

  // The tensor becomes the sum of the ranks' tensors, which hold inputOf().
  const std::vector<int32_t>& reduce(int rank, uint32_t hash) {
    std::vector<int32_t>& tensor = tensors.emplace_back(64, inputOf(group.called(rank) + 1, rank));
    auto* const bytes = reinterpret_cast<unsigned char*>(tensor.data());
    Exchange call{};
    call.call = hash;
    call.root = -1;
    call.pieces = 1;
    call.piece = call.bytes = 256;
    call.inputCount = 1;
    call.inputs[0] = bytes;
    group.call(rank, "reduce", call, [bytes](const Exchange& exchange) {
      reduceAll<int32_t>({exchange, 0, 256, bytes, Combine::kSum});
    });
    return tensor;
  }
  static int32_t inputOf(uint64_t call, int rank) { return int32_t(call) * 100 + rank; }

  World world;
  VirtualGroup group;
  std::deque<std::vector<int32_t>> tensors;
};

}  // namespace mooncake::kernels
