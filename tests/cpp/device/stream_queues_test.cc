#include "device/stream_queues.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <set>

#include "device/accelerator_suite.h"
#include "device/fake/fake_devices.h"
#include "device/queue_probe.h"

namespace mooncake::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

struct Device {
  explicit Device(size_t queues) : devices(makeFakeDevices(queues)) {}

  StreamWord* newWord() {
    const auto memory = valueOf(devices->allocatePinned(sizeof(StreamWord)));
    return new (memory.data()) StreamWord(0);
  }
  // Lets a stream wait for a word; release() ends all these waits.
  void hold(DeviceStream stream) { EXPECT_OK(devices->awaitWord(stream, gate, gates + 1)); }
  void release() { gate->store(++gates); }
  bool moves(DeviceStream stream, milliseconds limit = milliseconds(50)) {
    StreamWord* const word = newWord();
    EXPECT_OK(devices->writeWord(stream, word, 1));
    const Deadline deadline = Deadline::after(limit);
    while (word->load() != 1 && !deadline.passed()) std::this_thread::yield();
    return word->load() == 1;
  }
  StreamQueues& queues() { return *valueOf(devices->streamQueues(0)); }

  const std::unique_ptr<FakeDevices> devices;
  StreamWord* const gate = newWord();
  uint32_t gates = 0;  // opened
};

TEST(FakeQueues, AWaitHoldsUpTheStreamsOfItsQueueOnly) {
  Device device(2);
  const DeviceStream second = valueOf(device.devices->createStream(0));
  const DeviceStream third =
      valueOf(device.devices->createStream(0));  // shares the default's queue
  device.hold(device.devices->defaultStream(0));
  EXPECT_TRUE(device.moves(second, seconds(10)));
  EXPECT_FALSE(device.moves(third));
  device.release();
  EXPECT_TRUE(device.moves(third, seconds(10)));
}

// As on a GPU: only what follows on the same stream waits for it.
TEST(FakeQueues, LongWorkHoldsUpNobodyUntilItsStreamHasMore) {
  Device device(1);
  const DeviceStream first = device.devices->defaultStream(0);
  const DeviceStream other = valueOf(device.devices->createStream(0));
  StreamWord* const end = device.newWord();
  EXPECT_OK(device.devices->enqueue(first, [end] {
    while (end->load() == 0) std::this_thread::yield();
  }));
  EXPECT_TRUE(device.moves(other, seconds(10)));
  StreamWord* const after = device.newWord();
  EXPECT_OK(device.devices->writeWord(first, after, 1));
  EXPECT_FALSE(device.moves(other));
  end->store(1);
  EXPECT_TRUE(device.moves(other, seconds(10)));
}

TEST(FakeQueues, HaltedStreamsLeaveTheQueue) {
  Device device(1);
  device.hold(device.devices->defaultStream(0));
  const DeviceStream other = valueOf(device.devices->createStream(0));
  StreamWord* const word = device.newWord();
  EXPECT_OK(device.devices->writeWord(other, word, 1));
  device.devices->loseContext();
  EXPECT_EQ(word->load(), 0u);
}

TEST(QueueProbe, FindsTheStreamOfTheSameQueue) {
  Device device(4);
  const auto probe = valueOf(QueueProbe::make(*device.devices));
  std::vector<DeviceStream> streams;
  for (int i = 0; i < 4; ++i) streams.push_back(valueOf(device.devices->createStream(0)));
  for (size_t i = 0; i < 4; ++i) {
    const DeviceStream next = valueOf(device.devices->createStream(0));
    EXPECT_EQ(valueOf(probe->heldUpBy(next, streams)), std::optional(i));
  }
  const DeviceStream fifth = valueOf(device.devices->createStream(0));
  EXPECT_EQ(valueOf(probe->heldUpBy(fifth, std::span(streams).subspan(1))), std::nullopt);
}

// A question that cannot be asked leaves no stream waiting.
TEST(QueueProbe, AFailedQuestionHoldsUpNobody) {
  Device device(2);
  const auto probe = valueOf(QueueProbe::make(*device.devices));
  const DeviceStream waiting = valueOf(device.devices->createStream(0));
  const std::vector<DeviceStream> streams{valueOf(device.devices->createStream(0))};
  EXPECT_OK(device.devices->inject({.call = "writeWord"}));
  EXPECT_FALSE(probe->heldUpBy(waiting, streams).ok());
  EXPECT_TRUE(device.moves(waiting, seconds(10)));
}

// Only the wait of the question counts.
TEST(QueueProbe, AStreamThatAnotherOneHoldsUpIsNoAnswer) {
  Device device(3);
  const auto probe = valueOf(QueueProbe::make(*device.devices));
  const DeviceStream other = valueOf(device.devices->createStream(0));
  const DeviceStream waiting = valueOf(device.devices->createStream(0));
  device.hold(other);
  EXPECT_EQ(valueOf(probe->heldUpBy(waiting, std::span(&other, 1))), std::nullopt);
  device.release();
}

TEST(QueueProbe, AStreamThatDoesNotMoveTellsNothing) {
  Device device(2);
  const auto probe = valueOf(QueueProbe::make(*device.devices));
  const std::vector<DeviceStream> streams{valueOf(device.devices->createStream(0))};
  const DeviceStream held = valueOf(device.devices->createStream(0));
  device.hold(held);
  EXPECT_EQ(probe->heldUpBy(held, streams).status().code(), ErrorCode::kTimeout);
  device.release();
  EXPECT_EQ(valueOf(probe->heldUpBy(held, streams)), std::nullopt);
}

TEST(QueueProbe, FindsAStreamThatMoves) {
  Device device(2);
  const auto probe = valueOf(QueueProbe::make(*device.devices));
  const std::vector<DeviceStream> streams{valueOf(device.devices->createStream(0)),
                                          valueOf(device.devices->createStream(0))};
  device.hold(streams[0]);
  EXPECT_EQ(valueOf(probe->findMoving(streams, Deadline::after(seconds(10)))), 1u);
  device.hold(streams[1]);
  EXPECT_EQ(probe->findMoving(streams, Deadline::after(milliseconds(20))).status().code(),
            ErrorCode::kTimeout);
  device.release();
  EXPECT_OK(probe->findMoving(streams, Deadline::after(seconds(10))).status());
}

class StreamQueuesTest : public ::testing::TestWithParam<size_t> {};

INSTANTIATE_TEST_SUITE_P(Queues, StreamQueuesTest, ::testing::Values(3, 5, 8, 32));

// However many streams wait: prompt work runs, and no two of them hold each other up.
TEST_P(StreamQueuesTest, StreamsThatWaitHoldUpNoneOfOurs) {
  Device device(GetParam());
  StreamQueues& queues = device.queues();
  EXPECT_EQ(queues.count(), GetParam());
  EXPECT_TRUE(queues.hasWaits());
  std::vector<DeviceStream> waiting;
  for (;;) {
    const auto taken = queues.take(StreamRole::kWaits);
    if (!taken.ok()) {
      EXPECT_EQ(taken.error().code, ErrorCode::kExhausted);
      EXPECT_NE(taken.error().message.find("CUDA_DEVICE_MAX_CONNECTIONS=32"), std::string::npos);
      break;
    }
    waiting.push_back(*taken);
  }
  EXPECT_EQ(waiting.size(), GetParam() - 2);
  const DeviceStream shared = valueOf(queues.take(StreamRole::kFollows));
  for (const DeviceStream& stream : waiting) {
    EXPECT_TRUE(device.moves(stream, seconds(10)));
    device.hold(stream);
  }
  EXPECT_TRUE(device.moves(shared, seconds(10)));
  device.hold(shared);
  EXPECT_TRUE(device.moves(queues.prompt(), seconds(10)));
  device.release();
}

TEST_P(StreamQueuesTest, AQueueServesAgainWhenItsStreamIsGivenBack) {
  Device device(GetParam());
  StreamQueues& queues = device.queues();
  for (int round = 0; round < 3; ++round) {
    std::vector<DeviceStream> taken;
    for (size_t i = 0; i < GetParam() - 2; ++i)
      taken.push_back(valueOf(queues.take(StreamRole::kWaits)));
    EXPECT_FALSE(queues.take(StreamRole::kWaits).ok());
    for (const DeviceStream& stream : taken) queues.giveBack(stream);
  }
}

// As the stream of a group that ends while its work runs.
TEST_P(StreamQueuesTest, AStreamThatIsGivenBackBusyServesLater) {
  Device device(GetParam());
  StreamQueues& queues = device.queues();
  std::vector<DeviceStream> taken;
  for (size_t i = 0; i < GetParam() - 2; ++i)
    taken.push_back(valueOf(queues.take(StreamRole::kWaits)));
  device.hold(taken.front());
  queues.giveBack(taken.front());
  EXPECT_EQ(queues.take(StreamRole::kWaits).status().code(), ErrorCode::kExhausted);
  device.release();
  EXPECT_TRUE(device.moves(taken.front(), seconds(10)));
  EXPECT_OK(queues.take(StreamRole::kWaits).status());
  EXPECT_EQ(queues.take(StreamRole::kWaits).status().code(), ErrorCode::kExhausted);
}

TEST_P(StreamQueuesTest, AStreamBesideIsHeldUpByItsStreamOnly) {
  Device device(GetParam());
  StreamQueues& queues = device.queues();
  const DeviceStream waits = valueOf(queues.take(StreamRole::kWaits));
  const DeviceStream beside = valueOf(queues.takeBeside(waits));
  const DeviceStream shared = valueOf(queues.take(StreamRole::kFollows));
  device.hold(shared);
  EXPECT_TRUE(device.moves(beside, seconds(10)));
  device.hold(waits);
  EXPECT_FALSE(device.moves(beside));
  device.release();
}

TEST(StreamQueues, TooFewQueuesHaveNoWaits) {
  for (const size_t count : {1, 2}) {
    Device device(count);
    EXPECT_EQ(device.queues().count(), count);
    EXPECT_FALSE(device.queues().hasWaits());
    EXPECT_EQ(device.queues().take(StreamRole::kWaits).status().code(), ErrorCode::kExhausted);
    EXPECT_FALSE(valueOf(device.queues().reserve(device.devices->defaultStream(0))));
    EXPECT_TRUE(device.moves(device.queues().prompt(), seconds(10)));
    EXPECT_OK(device.queues().take(StreamRole::kFollows).status());
    EXPECT_EQ(device.queues().checkPrompt().ok(), count == 2);
  }
}

// With two queues, all that waits is in the second one.
TEST(StreamQueues, PromptWorkHasOneOfTwoQueues) {
  Device device(2);
  StreamQueues& queues = device.queues();
  for (int round = 0; round < 3; ++round) {
    device.hold(valueOf(queues.take(StreamRole::kFollows)));
    EXPECT_TRUE(device.moves(queues.prompt(), seconds(10)));
  }
  device.release();
}

TEST(StreamQueues, WithoutSharingEachStreamWaits) {
  Device device(0);
  std::set<void*> handles;
  for (int i = 0; i < 100; ++i)
    handles.insert(valueOf(device.queues().take(StreamRole::kWaits)).handle);
  EXPECT_EQ(handles.size(), 100u);
  EXPECT_TRUE(valueOf(device.queues().reserve(device.devices->defaultStream(0))));
}

// A program stream may wait only where none of ours would be held up, and owns the queue from then on.
TEST(StreamQueues, AStreamOfTheProgramTakesItsQueue) {
  Device device(4);
  StreamQueues& queues = device.queues();
  size_t granted = 0;
  std::vector<DeviceStream> programs;
  for (int i = 0; i < 4; ++i) {
    programs.push_back(valueOf(device.devices->createStream(0)));
    const bool isGranted = valueOf(queues.reserve(programs.back()));
    EXPECT_EQ(valueOf(queues.reserve(programs.back())), isGranted);
    granted += isGranted;
  }
  EXPECT_EQ(granted, 2u);  // not the queue of prompt work, and not the shared one
  EXPECT_EQ(queues.take(StreamRole::kWaits).status().code(), ErrorCode::kExhausted);
  for (const DeviceStream& stream : programs) EXPECT_TRUE(device.moves(stream, seconds(10)));
}

TEST(StreamQueues, AStreamOfTheProgramSharesNoQueueWithAnOwner) {
  Device device(4);
  StreamQueues& queues = device.queues();
  std::vector<DeviceStream> owners;
  for (int i = 0; i < 2; ++i) owners.push_back(valueOf(queues.take(StreamRole::kWaits)));
  for (int i = 0; i < 8; ++i) {
    const DeviceStream program = valueOf(device.devices->createStream(0));
    if (valueOf(queues.reserve(program))) ADD_FAILURE() << "no queue is left";
  }
  queues.giveBack(owners.front());
  std::vector<DeviceStream> reserved;
  for (int i = 0; i < 4; ++i) {
    const DeviceStream program = valueOf(device.devices->createStream(0));
    if (valueOf(queues.reserve(program))) reserved.push_back(program);
  }
  EXPECT_EQ(reserved.size(), 1u);
  EXPECT_TRUE(valueOf(queues.reserve(reserved.front())));
  for (const bool isLast : {false, true}) {
    queues.release(reserved.front());
    EXPECT_EQ(queues.take(StreamRole::kWaits).ok(), isLast);
  }
}

// A program that works on many streams in turn does not use up the queues.
TEST(StreamQueues, GroupsOnManyStreamsOfTheProgramFindQueues) {
  Device device(8);
  StreamQueues& queues = device.queues();
  for (int round = 0; round < 30; ++round) {
    const DeviceStream program = valueOf(device.devices->createStream(0));
    const DeviceStream waits = valueOf(queues.take(StreamRole::kWaits, program));
    device.hold(waits);
    EXPECT_TRUE(device.moves(program, seconds(10)));
    EXPECT_TRUE(device.moves(queues.prompt(), seconds(10)));
    device.release();
    queues.giveBack(waits);
  }
}

TEST(StreamQueues, PromptWorkLeavesAQueueThatTheProgramHoldsUp) {
  Device device(4);
  StreamQueues& queues = device.queues();
  const DeviceStream first = queues.prompt();
  device.hold(first);
  const DeviceStream other = queues.prompt();
  EXPECT_NE(other.handle, first.handle);
  EXPECT_TRUE(device.moves(other, seconds(10)));
  device.release();
}

// Copies may be what the stopped kernels wait for.
TEST(StreamQueues, WhatStopsKernelsHasAStreamOfItsOwn) {
  for (const size_t count : {2, 8}) {
    Device device(count);
    StreamQueues& queues = device.queues();
    const DeviceStream waits = valueOf(queues.take(StreamRole::kFollows));
    device.hold(waits);
    std::set<void*> handles{queues.prompt().handle};
    for (int i = 0; i < 3; ++i) {
      const DeviceStream stops = valueOf(queues.take(StreamRole::kStops));
      EXPECT_TRUE(handles.insert(stops.handle).second);
      EXPECT_TRUE(device.moves(stops, seconds(10)));
    }
    device.release();
  }
}

TEST(StreamQueues, WithoutWordsOfTheDriverNoStreamWaits) {
  Device device(8);
  EXPECT_OK(device.devices->inject(
      {.call = "awaitWord", .times = 1000, .code = ErrorCode::kUnsupported}));
  StreamQueues& queues = device.queues();
  EXPECT_EQ(queues.take(StreamRole::kWaits).status().code(), ErrorCode::kExhausted);
  EXPECT_OK(queues.take(StreamRole::kFollows).status());
  EXPECT_TRUE(device.moves(queues.prompt(), seconds(10)));
}

TEST(StreamQueues, AQueueThatIsNotKnownIsNotGranted) {
  Device device(4);
  const DeviceStream held = device.devices->defaultStream(0);
  device.hold(held);
  StreamQueues& queues = device.queues();
  EXPECT_EQ(queues.count(), 3u);
  device.release();
  EXPECT_TRUE(device.moves(held, seconds(10)));
  EXPECT_FALSE(valueOf(queues.reserve(held)));
}

// As if the program began with work on all of its streams.
TEST(StreamQueues, QueuesThatAreAllHeldUpAreFoundLater) {
  Device device(3);
  std::vector<DeviceStream> held{device.devices->defaultStream(0)};
  for (int i = 0; i < 2; ++i) held.push_back(valueOf(device.devices->createStream(0)));
  for (const DeviceStream& stream : held) device.hold(stream);
  StreamQueues& queues = device.queues();
  EXPECT_EQ(queues.count(), 0u);
  device.release();
  EXPECT_OK(queues.take(StreamRole::kWaits).status());
  EXPECT_EQ(queues.count(), 3u);
}

// Whichever queue the program works in first: prompt work goes on while that waits.
TEST(StreamQueues, TheFirstStreamOfTheProgramIsBesidePromptWork) {
  for (const size_t count : {2, 3, 8}) {
    for (size_t before = 0; before < count; ++before) {
      Device device(count);
      DeviceStream program = device.devices->defaultStream(0);
      for (size_t i = 0; i < before; ++i) program = valueOf(device.devices->createStream(0));
      EXPECT_EQ(valueOf(device.queues().reserve(program)), count > 2);
      const DeviceStream prompt = device.queues().prompt();
      device.hold(program);
      EXPECT_TRUE(device.moves(prompt, seconds(10)));
      device.release();
    }
  }
}

// The program's first call may come behind long work.
TEST(StreamQueues, AQueueThatTheProgramHoldsUpIsLeftOut) {
  Device device(8);
  device.hold(device.devices->defaultStream(0));
  StreamQueues& queues = device.queues();
  EXPECT_EQ(queues.count(), 7u);
  for (int i = 0; i < 5; ++i)
    EXPECT_TRUE(device.moves(valueOf(queues.take(StreamRole::kWaits)), seconds(10)));
  device.release();
}

}  // namespace
}  // namespace mooncake::testing
