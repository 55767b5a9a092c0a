// How an operation ends on a rank that was stopped in it and evicted. Meanwhile the others went two
// operations further, or to their end.
#include <gtest/gtest.h>
#include <memory>
#include <vector>

#include "base/failpoint.h"
#include "collectives/collectives.h"
#include "forked_ranks.h"
#include "loopback_cards.h"

namespace mooncake::test {
namespace {

constexpr int kSize = 3;
constexpr int kVictim = 2;
constexpr size_t kCount = 300;
constexpr int kStoppedIn = 1;  // of the operations that the ranks call, from 0 on
constexpr int kHeldIn = kStoppedIn + 2;
constexpr auto kDeadline = std::chrono::seconds(30);

struct Scene {
  StoreMemory store;
  bool isHeld;                   // two operations later, the survivors wait for isResolved
  std::atomic<int> held;         // survivors that have packed their input two operations later
  std::atomic<bool> isResolved;  // the victim's operation has ended, or begins its flush
  std::atomic<ErrorCode> code;   // how it ended there
  std::atomic<float> sum;        // the victim's result
  std::atomic<int> ended;        // ranks that have ended all of their operations
};

// State of this process, for its observer of failpoints.
Scene* scene = nullptr;
int rank = 0;
std::atomic<int> operation{-1};

template <typename Condition>
void await(Condition&& condition) {
  const Deadline deadline = Deadline::after(kDeadline);
  while (!condition() && !deadline.passed())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void onFailpoint(const char* name) {
  const std::string_view point = name;
  if (rank == kVictim) {
    if (operation != kStoppedIn) return;
    if (point == "all-begun") std::raise(SIGSTOP);
    if (point == "park") scene->isResolved = true;
  } else if (scene->isHeld && operation == kHeldIn && point == "begin") {
    ++scene->held;
    await([] { return scene->isResolved.load(); });
  }
}

float givenIn(int index) { return float(1 + 10 * index); }

void runRank(const std::vector<std::string>& transports) {
  const LoopbackCards cards(transports);
  ForkedStore store(scene->store, std::vector<bool>(kSize));
  EngineOptions options{.jobKey = Bytes(32, std::byte{7}),
                        .logName = "rank " + std::to_string(rank),
                        .arenaBytes = size_t(1) << 30};
  options.env.failureTimeout = std::chrono::milliseconds(300);
  options.env.transports = transports;
  auto engine = Engine::create(std::move(options));
  if (!engine.ok()) return;
  auto group =
      Group::create(*engine, store, {.name = "eviction", .rank = rank, .size = kSize, .raises = {}},
                    Deadline::after(kDeadline));
  if (!group.ok()) return;
  engine->reset();
  observeFailpoints(onFailpoint);
  for (int i = 0; i <= kHeldIn; ++i) {
    operation = i;
    std::vector<float> data(kCount, givenIn(i));
    const Status status =
        allreduce(**group, std::as_writable_bytes(std::span(data)),
                  {DType::kFloat32, ReduceKind::kSum}, Deadline::after(kDeadline));
    if (rank == kVictim && i == kStoppedIn) {
      scene->code = status.code();
      scene->sum = data[0];
      scene->isResolved = true;
    }
    if (!status.ok()) break;
  }
  (*group)->leave(Deadline::after(std::chrono::seconds(5)));
  group->reset();  // and the engine with it
  ++scene->ended;
}

class EvictionTest : public ::testing::TestWithParam<const char*> {
 protected:
  void start(bool isHeld) {
    memory_->isHeld = isHeld;
    for (int r = 0; r < kSize; ++r) {
      ranks_.push_back(std::make_unique<ForkedChild>([this, r] {
        scene = &*memory_;
        rank = r;
        runRank({GetParam()});
      }));
    }
  }
  void resumeVictim() {
    ranks_[kVictim]->resume();
    await([&] { return memory_->ended == kSize; });
    ASSERT_EQ(memory_->ended, kSize);
    // Over messages the data is in the victim's own memory, so the result may still be right.
    if (memory_->code == ErrorCode::kOk) {
      EXPECT_EQ(memory_->sum, kSize * givenIn(kStoppedIn));
    } else {
      EXPECT_EQ(memory_->code, ErrorCode::kEvicted);
    }
  }

  const SharedWithChildren<Scene> memory_;
  std::vector<std::unique_ptr<ForkedChild>> ranks_;
};

TEST_P(EvictionTest, WhatIsReadTooLateIsNoResult) {
  if (!canFork()) GTEST_SKIP() << "threads are left of other tests: run this one by itself";
  start(/*isHeld=*/true);
  await([&] { return memory_->held == kSize - 1; });
  ASSERT_EQ(memory_->held, kSize - 1) << "the others did not go on";
  resumeVictim();
}

// The fence words of the survivors must outlive their engines.
TEST_P(EvictionTest, NorAfterTheOthersHaveGone) {
  if (!canFork()) GTEST_SKIP() << "threads are left of other tests: run this one by itself";
  start(/*isHeld=*/false);
  await([&] { return memory_->ended == kSize - 1; });
  ASSERT_EQ(memory_->ended, kSize - 1) << "the others did not end";
  resumeVictim();
}

INSTANTIATE_TEST_SUITE_P(Transports, EvictionTest, ::testing::Values("shm", "tcp", "sim", "fabric"),
                         [](const auto& param) { return std::string(param.param); });

}  // namespace
}  // namespace mooncake::test
