#include "device/graph_words.h"

#include <atomic>
#include <chrono>
#include <gtest/gtest.h>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "device/accelerator_suite.h"
#include "device/fake/fake_devices.h"

namespace mooncake::testing {
namespace {

// A graph with two places beside its beginning, which notes how far its replays come.
class GraphWordsTest : public ::testing::Test {
 protected:
  GraphWordsTest() {
    words = valueOf(GraphWords::make(*devices));
    kept.push_back(words);
    stream = valueOf(devices->createStream(0));
    EXPECT_OK(devices->beginCapture(stream));
    for (uint32_t place = GraphWords::kBeginning; place <= 2; ++place) {
      EXPECT_OK(words->recordCopied(stream, place * 10));
      EXPECT_OK(words->recordRing(stream, place));
      EXPECT_OK(words->recordWait(stream, place));
      EXPECT_OK(devices->enqueue(stream, [this, place] { reached = int(place); }));
    }
    graph = valueOf(devices->endCapture(stream));
  }

  void replay() { EXPECT_OK(devices->replay(graph, stream)); }
  // Waits until a replay rings.
  uint32_t rung() {
    for (;;) {
      if (const auto place = words->takeRung()) return *place;
      std::this_thread::yield();
    }
  }
  void serve(uint32_t place) {
    EXPECT_EQ(rung(), place);
    EXPECT_EQ(words->takeRung(), std::nullopt);
    EXPECT_EQ(reached, int(place) - 1);
    EXPECT_EQ(words->copied(), place * 10);
    words->release(place);
  }

  const std::unique_ptr<FakeDevices> devices = makeFakeDevices();
  GraphWords* words = nullptr;
  // They are never freed. For the leak sanitizer something has to point to them.
  static inline auto& kept = *new std::vector<GraphWords*>;
  DeviceStream stream;
  uint64_t graph = 0;
  std::atomic<int> reached = -1;
};

TEST_F(GraphWordsTest, EachReplayWaitsAtEachPlace) {
  for (int round = 0; round < 20; ++round) {
    reached = -1;
    replay();
    for (uint32_t place = GraphWords::kBeginning; place <= 2; ++place) serve(place);
    EXPECT_OK(devices->synchronize(stream));
    EXPECT_EQ(reached, 2);
  }
}

TEST_F(GraphWordsTest, AReplayWaitsAlthoughTheOneBeforeItIsOver) {
  replay();
  for (uint32_t place = GraphWords::kBeginning; place <= 2; ++place) serve(place);
  EXPECT_OK(devices->synchronize(stream));
  reached = -1;
  replay();
  EXPECT_EQ(rung(), GraphWords::kBeginning);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(reached, -1);
  words->release(GraphWords::kBeginning);
  EXPECT_EQ(rung(), 1u);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(reached, 0);
  words->releaseForGood();
  EXPECT_OK(devices->synchronize(stream));
}

TEST_F(GraphWordsTest, NoReplayWaitsAfterTheEnd) {
  replay();
  EXPECT_EQ(rung(), GraphWords::kBeginning);
  words->releaseForGood();
  for (int round = 0; round < 3; ++round) {
    EXPECT_OK(devices->synchronize(stream));
    EXPECT_EQ(reached, 2);
    reached = -1;
    replay();
  }
  EXPECT_OK(devices->synchronize(stream));
}

// An operation of an earlier replay may end late.
TEST_F(GraphWordsTest, NoReplayWaitsAfterALateRelease) {
  words->releaseForGood();
  for (uint32_t place = GraphWords::kBeginning; place <= 2; ++place) {
    words->release(place);
    reached = -1;
    replay();
    EXPECT_OK(devices->synchronize(stream));
    EXPECT_EQ(reached, 2);
  }
}

}  // namespace
}  // namespace mooncake::testing
