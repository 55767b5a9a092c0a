#include "base/rank_cores.h"

#include <chrono>
#include <gtest/gtest.h>
#include <sched.h>
#include <thread>

#include "base/deadline.h"

namespace mooncake {
namespace {

cpu_set_t allowedCores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  EXPECT_EQ(::sched_getaffinity(0, sizeof(cores), &cores), 0);
  return cores;
}

TEST(RankCores, SaysWhereItRuns) {
  std::thread([] {
    cpu_set_t one;
    CPU_ZERO(&one);
    const int core = ::sched_getcpu();
    CPU_SET(core, &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof(one), &one), 0);
    RankCores::Word own{0};
    RankCores(&own, {}).note();
    EXPECT_EQ(own.load(), uint32_t(core + 1));
  }).join();
}

TEST(RankCores, LeavesACrowdedCore) {
  const cpu_set_t before = allowedCores();
  if (CPU_COUNT(&before) < 2) GTEST_SKIP() << "needs two cores";
  RankCores::Word own{0}, other{0};
  RankCores cores(&own, {&other});
  const auto deadline = Deadline::after(std::chrono::seconds(20));
  // The kernel may move us, too, so the core is noted anew in every round.
  bool hasMoved = false;
  while (!hasMoved && !deadline.passed()) {
    cores.note();
    const uint32_t here = own.load();
    other.store(here);
    cores.spread();
    hasMoved = own.load() != here;
  }
  EXPECT_TRUE(hasMoved);
  const cpu_set_t after = allowedCores();
  EXPECT_TRUE(CPU_EQUAL(&before, &after)) << "the kernel may place it no longer as before";
}

TEST(RankCores, StaysWhereItMayNotLeave) {
  std::thread([] {
    cpu_set_t one;
    CPU_ZERO(&one);
    const int core = ::sched_getcpu();
    CPU_SET(core, &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof(one), &one), 0);
    RankCores::Word own{0}, other{uint32_t(core + 1)};
    RankCores(&own, {&other}).spread();
    EXPECT_EQ(own.load(), uint32_t(core + 1));
    const cpu_set_t after = allowedCores();
    EXPECT_TRUE(CPU_EQUAL(&one, &after));
  }).join();
}

TEST(RankCores, WhatOthersSayIsOnlyAHint) {
  RankCores::Word own{0}, nobody{0}, beyond{UINT32_MAX}, last{CPU_SETSIZE}, after{CPU_SETSIZE + 1};
  RankCores::Word here{uint32_t(::sched_getcpu() + 1)};
  RankCores cores(&own, {&nobody, &beyond, &last, &after, &here});
  cores.spread();
  EXPECT_NE(own.load(), 0u);
}

}  // namespace
}  // namespace mooncake
