#include "device/fake/fake_stream.h"

#include <gtest/gtest.h>

#include "device/accelerator_suite.h"
#include "device/fake/fake_mark.h"

namespace mooncake::testing {
namespace {

struct FakeStreamTest : public ::testing::Test {
  StreamWord word{0};  // outlives the streams
  FakeStream first{{.device = 0, .handle = nullptr}};
  FakeStream second{{.device = 1, .handle = reinterpret_cast<void*>(7)}};
};

TEST_F(FakeStreamTest, HasAName) {
  EXPECT_EQ(first.name(), "stream 0 of fake device 0");
  EXPECT_EQ(second.name(), "stream 7 of fake device 1");
}

// One stream is halted before the other one, which waits for it.
TEST_F(FakeStreamTest, AStreamThatWaitsForDroppedWorkIsHalted) {
  const auto mark = std::make_shared<FakeMark>();
  bool hasRun = false;
  EXPECT_OK(first.enqueue([this](FakeStream& runs) { runs.awaitWord(&word, 1); }));
  EXPECT_OK(first.enqueue(FakeMark::recordTask(mark)));
  EXPECT_OK(second.enqueue(FakeMark::waitTask(mark)));
  EXPECT_OK(second.enqueue([&](FakeStream&) { hasRun = true; }));
  first.halt();
  EXPECT_EQ(second.synchronize().code(), ErrorCode::kSystem);
  EXPECT_FALSE(hasRun);
  EXPECT_FALSE(mark->hasHappened());
  EXPECT_EQ(second.enqueue([](FakeStream&) {}).code(), ErrorCode::kSystem);
}

TEST_F(FakeStreamTest, AMarkThatHasHappenedStaysSo) {
  const auto mark = std::make_shared<FakeMark>();
  EXPECT_OK(first.enqueue(FakeMark::recordTask(mark)));
  EXPECT_OK(second.enqueue(FakeMark::waitTask(mark)));
  EXPECT_OK(second.synchronize());
  EXPECT_TRUE(mark->hasHappened());
}

TEST_F(FakeStreamTest, AClosedStreamEndsAfterItsWork) {
  bool hasRun = false;
  EXPECT_TRUE(first.hasEnded());  // it has no thread yet
  EXPECT_OK(first.enqueue([this](FakeStream& runs) { runs.awaitWord(&word, 1); }));
  EXPECT_OK(first.enqueue([&](FakeStream&) { hasRun = true; }));
  first.close();
  EXPECT_FALSE(first.hasEnded());
  word = 1;
  first.join(Deadline::after(kDevicePatience));
  EXPECT_TRUE(first.hasEnded());
  EXPECT_TRUE(hasRun);
}

TEST_F(FakeStreamTest, AnObjectIsKeptUntilTheWorkBeforeItIsOver) {
  auto object = std::make_shared<int>(0);
  first.retain(object);  // there is no work
  EXPECT_EQ(object.use_count(), 1);
  EXPECT_OK(first.enqueue([this](FakeStream& runs) { runs.awaitWord(&word, 1); }));
  first.retain(object);
  EXPECT_EQ(object.use_count(), 2);
  word = 1;
  EXPECT_TRUE(eventually([&] { return object.use_count() == 1; }));
}

}  // namespace
}  // namespace mooncake::testing
