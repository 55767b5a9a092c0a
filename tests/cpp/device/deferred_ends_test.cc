#include "device/deferred_ends.h"

#include <future>
#include <gtest/gtest.h>

#include "device/accelerator_suite.h"
#include "device/fake/fake_devices.h"

namespace mooncake::testing {
namespace {

class DeferredEndsTest : public ::testing::Test {
 protected:
  // Work of the stream that ends when the promise is set.
  void block(DeviceStream on, std::promise<void>& opens) {
    EXPECT_OK(devices->enqueue(on, [future = opens.get_future().share()] { future.wait(); }));
  }
  void add(std::vector<DeviceStream> streams) {
    ends.add(*devices, std::move(streams), [this] { ++ran; });
  }
  bool hasRun(int count) {
    ends.runDue();
    return ran == count;
  }

  const std::unique_ptr<FakeDevices> devices = makeFakeDevices();
  const DeviceStream stream = devices->defaultStream(0);
  const DeviceStream other = valueOf(devices->createStream(1));
  int ran = 0;
  DeferredEnds ends;
};

TEST_F(DeferredEndsTest, AnEndRunsOnceAllItsStreamsHavePassed) {
  std::promise<void> first, second;
  block(stream, first);
  block(other, second);
  add({stream, other});
  EXPECT_TRUE(hasRun(0));
  first.set_value();
  EXPECT_OK(devices->synchronize(stream));
  EXPECT_TRUE(hasRun(0));
  second.set_value();
  EXPECT_OK(devices->synchronize(other));
  EXPECT_TRUE(hasRun(1));
  EXPECT_EQ(ends.waiting(), 0u);
  EXPECT_TRUE(hasRun(1));
}

TEST_F(DeferredEndsTest, LaterWorkIsNotAwaited) {
  std::promise<void> later;
  add({stream});
  block(stream, later);
  EXPECT_TRUE(eventually([&] { return hasRun(1); }));
  later.set_value();
}

// Nothing that add() and runDue() do is refused in a capture, nor spoils one.
TEST_F(DeferredEndsTest, ACaptureGoesOn) {
  int replayed = 0;
  EXPECT_OK(devices->beginCapture(stream));
  EXPECT_OK(devices->enqueue(stream, [&] { ++replayed; }));
  add({stream, other});
  EXPECT_TRUE(hasRun(0));
  const uint64_t graph = valueOf(devices->endCapture(stream));
  EXPECT_TRUE(eventually([&] { return hasRun(1); }));
  EXPECT_OK(devices->replay(graph, stream));
  EXPECT_OK(devices->synchronize(stream));
  EXPECT_EQ(replayed, 1);
}

TEST_F(DeferredEndsTest, WithALostContextNoEndRuns) {
  add({stream});
  devices->loseContext();
  EXPECT_TRUE(hasRun(0));
  EXPECT_EQ(ends.waiting(), 0u);
}

}  // namespace
}  // namespace mooncake::testing
