#include <cstring>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "races.h"
#include "tests/simt/world.h"

// Small kernels with a defect each, and without: the emulator, the values or the thread sanitizer
// must find the defects, and must find nothing else.
namespace mooncake::kernels {
namespace {

using simt::kFindsRaces;
using simt::racesReported;
using simt::Report;
using simt::World;

constexpr uint64_t kSeeds = kFindsRaces ? 10 : 100;

struct Found {
  unsigned wrong = 0, problems = 0, races = 0;
  std::string problem;
};

// Runs a test with many seeds. `once` launches kernels, and returns a check of the values.
template <typename Once>
Found sweep(Once once, uint64_t seeds = kSeeds) {
  Found found;
  const unsigned before = racesReported();
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    World world({.seed = seed, .hangNs = 10'000'000});
    auto isRight = once(world, seed);
    const Report report = world.run();
    if (!report.ok) {
      ++found.problems;
      found.problem = report.problem;
    } else if (!isRight()) {
      ++found.wrong;
    }
  }
  found.races = racesReported() - before;
  return found;
}

void expectClean(const Found& found) {
  EXPECT_EQ(found.wrong, 0u);
  EXPECT_EQ(found.problems, 0u) << found.problem;
  EXPECT_EQ(found.races, 0u);
}

void expectRace(const Found& found) {
  if (kFindsRaces) EXPECT_GT(found.races, 0u);
}

void expectProblem(const Found& found, const std::string& text) {
  EXPECT_GT(found.problems, 0u);
  EXPECT_NE(found.problem.find(text), std::string::npos) << found.problem;
}

MC_DEVICE void waitFor(const uint32_t* word, uint32_t value) {
  while (loadAcquireSystem(word) != value) relax();
}

// ---- a value goes from one rank to another, by a flag

enum class Flag { kRight, kRelaxedStore, kRelaxedLoad, kDeviceScope, kNever };

template <Flag kFlag>
Found passValue() {
  return sweep([](World& world, uint64_t seed) {
    struct Memory {
      uint32_t value = 0, flag = 0, seen = 0;
    };
    auto memory = std::make_shared<Memory>();
    const auto value = uint32_t(seed * 7);
    world.launch(0, 0, "send", {1}, {1}, 0, [memory, value] {
      memory->value = value;
      if constexpr (kFlag == Flag::kRelaxedStore) storeRelaxedSystem(&memory->flag, 1);
      if constexpr (kFlag == Flag::kDeviceScope) storeReleaseDevice(&memory->flag, 1);
      if constexpr (kFlag == Flag::kRight || kFlag == Flag::kRelaxedLoad)
        storeReleaseSystem(&memory->flag, 1);
    });
    world.launch(1, 0, "receive", {1}, {1}, 0, [memory] {
      if constexpr (kFlag == Flag::kRelaxedLoad) {
        while (loadRelaxedSystem(&memory->flag) != 1) relax();
      } else {
        waitFor(&memory->flag, 1);
      }
      memory->seen = memory->value;
    });
    return [memory, value] { return memory->seen == value; };
  });
}

TEST(Emulator, AFlagOrdersData) { expectClean(passValue<Flag::kRight>()); }
TEST(Emulator, ARelaxedFlagIsARace) {
  expectRace(passValue<Flag::kRelaxedStore>());
  expectRace(passValue<Flag::kRelaxedLoad>());
}
TEST(Emulator, AFlagOfDeviceScopeBetweenRanks) {
  expectProblem(passValue<Flag::kDeviceScope>(), "scope");
}
TEST(Emulator, AHangSaysWhereThreadsStand) {
  const Found found = passValue<Flag::kNever>();
  expectProblem(found, "hang");
  EXPECT_NE(found.problem.find("1 x rank 1 receive block 0: spinning at emulator_test.cc:"),
            std::string::npos)
      << found.problem;
}

// ---- two rounds through one buffer, or two

template <bool kTwoBuffers>
Found rounds() {
  return sweep([](World& world, uint64_t seed) {
    constexpr uint32_t kRounds = 4;
    struct Memory {
      uint32_t buffer[2] = {}, flags[2] = {}, sums[2] = {};
    };
    auto memory = std::make_shared<Memory>();
    for (int rank = 0; rank < 2; ++rank) {
      world.launch(rank, 0, "round", {1}, {1}, 0, [memory, rank, seed] {
        // Rank 0 publishes, rank 1 reads, and both signal each round before the next one.
        for (uint32_t round = 1; round <= kRounds; ++round) {
          uint32_t* const place = &memory->buffer[kTwoBuffers ? round % 2 : 0];
          if (rank == 0) *place = uint32_t(seed) + round * round;
          storeReleaseSystem(&memory->flags[rank], round);
          while (loadAcquireSystem(&memory->flags[1 - rank]) < round) relax();
          if (rank == 1) memory->sums[1] += *place;
        }
      });
    }
    uint32_t sum = 0;
    for (uint32_t round = 1; round <= kRounds; ++round) sum += uint32_t(seed) + round * round;
    return [memory, sum] { return memory->sums[1] == sum; };
  });
}

TEST(Emulator, TwoBuffersForTwoRounds) { expectClean(rounds<true>()); }
TEST(Emulator, OneBufferForTwoRounds) {
  const Found found = rounds<false>();
  EXPECT_GT(found.wrong, 0u);
  expectRace(found);
}

// ---- within a block

template <bool kHasBarrier>
Found reverse() {
  return sweep([](World& world, uint64_t seed) {
    auto out = std::make_shared<std::vector<uint32_t>>(96);
    world.launch(0, 0, "reverse", {1}, {96}, 0, [out, seed] {
      struct Values {
        uint32_t of[96];
      };
      MC_SHARED(Values, values);
      values.of[threadIdx.x] = uint32_t(seed) + threadIdx.x;
      if constexpr (kHasBarrier) __syncthreads();
      (*out)[threadIdx.x] = values.of[95 - threadIdx.x];
    });
    return [out, seed] {
      for (uint32_t i = 0; i < 96; ++i)
        if ((*out)[i] != uint32_t(seed) + 95 - i) return false;
      return true;
    };
  });
}

TEST(Emulator, ABarrierOrdersSharedMemory) { expectClean(reverse<true>()); }
TEST(Emulator, AMissingBarrier) {
  const Found found = reverse<false>();
  EXPECT_GT(found.wrong, 0u);
  expectRace(found);
}

template <bool kHasSync>
Found shuffle() {
  return sweep([](World& world, uint64_t seed) {
    auto out = std::make_shared<std::vector<uint32_t>>(32);
    world.launch(0, 0, "shuffle", {1}, {32}, 0, [out, seed] {
      MC_SHARED(uint32_t, shared);
      uint32_t number = 0;
      if (lane() == 0) {
        shared = uint32_t(seed) * 3;
        number = 5;
      }
      number = __shfl_sync(0xffffffffu, number, 0);
      if constexpr (kHasSync) __syncwarp();
      (*out)[lane()] = shared + number;
    });
    return [out, seed] { return (*out)[31] == uint32_t(seed) * 3 + 5; };
  });
}

TEST(Emulator, SyncwarpOrdersMemory) { expectClean(shuffle<true>()); }
TEST(Emulator, AShuffleOrdersNone) { expectRace(shuffle<false>()); }

template <bool kIsAcqRel>
Found lastBlock() {
  return sweep([](World& world, uint64_t seed) {
    struct Memory {
      uint32_t values[4] = {}, ended = 0, sum = 0;
    };
    auto memory = std::make_shared<Memory>();
    world.launch(0, 0, "count", {4}, {1}, 0, [memory, seed] {
      memory->values[blockIdx.x] = uint32_t(seed) + blockIdx.x;
      const uint32_t ended =
          kIsAcqRel ? addAcqRelDevice(&memory->ended, 1) : addRelaxedDevice(&memory->ended, 1);
      if (ended != 3) return;
      for (const uint32_t value : memory->values) memory->sum += value;
    });
    return [memory, seed] { return memory->sum == 4 * uint32_t(seed) + 6; };
  });
}

TEST(Emulator, TheLastBlockSeesTheOthers) { expectClean(lastBlock<true>()); }
TEST(Emulator, ARelaxedCounterIsARace) { expectRace(lastBlock<false>()); }

TEST(Emulator, VotesAtABarrier) {
  expectClean(sweep([](World& world, uint64_t seed) {
    auto out = std::make_shared<std::vector<int>>(2 * 64);
    world.launch(0, 0, "vote", {1}, {64}, 0, [out, seed] {
      for (unsigned turn = 0; turn < 2; ++turn)
        (*out)[turn * 64 + threadIdx.x] = __syncthreads_and(turn == 0 || threadIdx.x != seed % 64);
    });
    return [out] {
      for (unsigned i = 0; i < 128; ++i)
        if ((*out)[i] != (i < 64)) return false;
      return true;
    };
  }));
}

TEST(Emulator, GlobalAccessToSharedMemory) {
  expectProblem(sweep([](World& world, uint64_t) {
                  world.launch(0, 0, "mix", {1}, {1}, 0, [] {
                    MC_SHARED(uint32_t, word);
                    storeRelaxedDevice(&word, 1);
                  });
                  return [] { return true; };
                }),
                "state space");
}

TEST(Emulator, LanesInDifferentCalls) {
  expectProblem(sweep([](World& world, uint64_t) {
                  world.launch(0, 0, "mix", {1}, {32}, 0, [] {
                    if (lane() < 16) {
                      (void)__shfl_sync(0xffffffffu, 1u, 0);
                    } else {
                      (void)__ballot_sync(0xffffffffu, true);
                    }
                  });
                  return [] { return true; };
                }),
                "different calls");
}

TEST(Emulator, AMaskWithoutTheLane) {
  expectProblem(sweep([](World& world, uint64_t) {
                  world.launch(0, 0, "mask", {1}, {32}, 0,
                               [] { (void)__ballot_sync(0x0000ffffu, true); });
                  return [] { return true; };
                }),
                "mask");
}

TEST(Emulator, ABarrierThatSomeThreadsNeverReach) {
  expectProblem(sweep([](World& world, uint64_t) {
                  auto word = std::make_shared<uint32_t>(0);
                  world.launch(0, 0, "stuck", {1}, {64}, 0, [word] {
                    if (threadIdx.x == 5) waitFor(word.get(), 1);
                    __syncthreads();
                  });
                  return [] { return true; };
                }),
                "63 x rank 0 stuck block 0: __syncthreads");
}

TEST(Emulator, WarpCalls) {
  expectClean(sweep([](World& world, uint64_t seed) {
    auto out = std::make_shared<std::vector<uint32_t>>(4 * 32);
    world.launch(0, 0, "warp", {1}, {32}, 0, [out, seed] {
      const uint32_t value = uint32_t(seed) % 5 + lane() % 3;
      (*out)[lane()] = __match_any_sync(0xffffffffu, value);
      (*out)[32 + lane()] = __reduce_add_sync(0xffffffffu, value);
      (*out)[64 + lane()] = __shfl_xor_sync(0xffffffffu, lane(), 8);
      (*out)[96 + lane()] = lane() < 8 ? __ballot_sync(0xffu, lane() % 2 == 0) : 0;
    });
    return [out, seed] {
      uint32_t sum = 0, same[3] = {};
      for (uint32_t i = 0; i < 32; ++i) {
        sum += uint32_t(seed) % 5 + i % 3;
        same[i % 3] |= 1u << i;
      }
      for (uint32_t i = 0; i < 32; ++i) {
        if ((*out)[i] != same[i % 3] || (*out)[32 + i] != sum || (*out)[64 + i] != (i ^ 8))
          return false;
        if ((*out)[96 + i] != (i < 8 ? 0x55u : 0u)) return false;
      }
      return true;
    };
  }));
}

TEST(Emulator, KernelsOfAStreamRunInOrder) {
  expectClean(sweep([](World& world, uint64_t seed) {
    auto value = std::make_shared<uint32_t>(uint32_t(seed));
    for (uint32_t step = 1; step <= 5; ++step)
      world.launch(0, 0, "step", {1}, {1}, 0, [value, step] { *value = *value * 3 + step; });
    return [value, seed] {
      auto expected = uint32_t(seed);
      for (uint32_t step = 1; step <= 5; ++step) expected = expected * 3 + step;
      return *value == expected;
    };
  }));
}

TEST(Emulator, KernelsOfTwoStreamsDoNot) {
  expectRace(sweep([](World& world, uint64_t) {
    auto value = std::make_shared<uint32_t>(0);
    for (int stream = 0; stream < 2; ++stream)
      world.launch(0, stream, "step", {1}, {1}, 0, [value] { ++*value; });
    return [] { return true; };
  }));
}

TEST(Emulator, AKilledRankStops) {
  const Found found = sweep([](World& world, uint64_t seed) {
    auto counts = std::make_shared<std::vector<uint32_t>>(2);
    for (int rank = 0; rank < 2; ++rank) {
      world.launch(rank, 0, "count", {1}, {1}, 0, [counts, rank] {
        for (int i = 0; i < 100; ++i) storeRelaxedSystem(&(*counts)[size_t(rank)], uint32_t(i) + 1);
      });
    }
    world.kill(1, seed % 90 + 1);
    return [counts, seed] { return (*counts)[0] == 100 && (*counts)[1] < seed % 90 + 1; };
  });
  expectClean(found);
}

TEST(Emulator, AStoppedRankGoesOn) {
  expectClean(sweep([](World& world, uint64_t seed) {
    auto words = std::make_shared<std::vector<uint32_t>>(2);
    auto late = std::make_shared<uint64_t>(0);
    world.launch(0, 0, "wait", {1}, {1}, 0, [words, late] {
      waitFor(&(*words)[1], 50);
      *late = now();
    });
    world.launch(1, 0, "count", {1}, {1}, 0, [words] {
      for (uint32_t i = 1; i <= 50; ++i) storeReleaseSystem(&(*words)[1], i);
    });
    world.stop(1, seed % 40 + 1, 5'000'000);
    return [late] { return *late >= 5'000'000; };
  }));
}

// Time passes also while a thread never rests.
TEST(Emulator, AStoppedRankGoesOnBesideABusyOne) {
  expectClean(sweep([](World& world, uint64_t) {
    auto words = std::make_shared<std::vector<uint32_t>>(2);
    auto hasCome = std::make_shared<bool>(false);
    world.launch(0, 0, "busy", {1}, {1}, 0, [words, hasCome] {
      for (uint32_t i = 1; i < 10'000 && !*hasCome; ++i) {
        storeRelaxedSystem(&(*words)[0], i);
        *hasCome = loadAcquireSystem(&(*words)[1]) != 0;
      }
    });
    world.launch(1, 0, "late", {1}, {1}, 0, [words] {
      loadRelaxedSystem(&(*words)[0]);
      storeReleaseSystem(&(*words)[1], 1);
    });
    world.stop(1, 1, 1'000);
    return [hasCome] { return *hasCome; };
  }));
}

TEST(Emulator, BlocksWaitForRoomOnTheDevice) {
  World world({.seed = 3, .residentBlocks = 2, .hangNs = 1'000'000});
  auto arrived = std::make_shared<uint32_t>(0);
  world.launch(0, 0, "meet", {3}, {1}, 0, [arrived] {
    addRelaxedDevice(arrived.get(), 1);
    while (loadRelaxedDevice(arrived.get()) != 3) relax();
  });
  const Report report = world.run();
  EXPECT_FALSE(report.ok);
  EXPECT_NE(report.problem.find("1 blocks have not begun"), std::string::npos) << report.problem;
}

#ifdef MOONCAKE_SIMT_PLAIN_ACCESSES
TEST(Emulator, CountsBytes) {
  World world({.seed = 1});
  std::vector<uint32_t> here(64), there(64);
  world.own(0, here.data(), 256);
  world.own(1, there.data(), 256);
  world.launch(0, 0, "copy", {1}, {64}, 0, [&] {
    const uint32_t value = there[threadIdx.x];
    here[threadIdx.x] = value;
    if (threadIdx.x == 0) storeReleaseSystem(&there[0], 1);
  });
  ASSERT_TRUE(world.run().ok);
  EXPECT_EQ(world.traffic(0).bytesReadThere, 256u);
  EXPECT_EQ(world.traffic(0).bytesWrittenHere, 256u);
  EXPECT_EQ(world.traffic(0).bytesReadHere, 0u);
  EXPECT_EQ(world.traffic(0).remoteStores, 1u);
}
#endif

}  // namespace
}  // namespace mooncake::kernels
