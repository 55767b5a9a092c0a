#include "device/fake/fake_devices.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/thread.h"
#include "child_process.h"
#include "device/accelerator_suite.h"
#include "device/peer_memory_suite.h"
#include "device/probe_stand_in.h"

namespace mooncake::testing {
namespace {

struct FakeKind {
  static Result<std::unique_ptr<FakeKind>> open() { return std::make_unique<FakeKind>(); }
  Accelerator& accelerator() { return *devices; }
  std::span<std::byte> allocate(int device, size_t bytes) {
    return valueOf(devices->allocate(device, bytes));
  }
  void free(std::span<std::byte> memory) { devices->free(memory); }
  static constexpr const char* kChild = "Fake/PeerMemorySuite/0.DISABLED_IsTheOwner";
  void useKernels() {
    devices->setKernels({.run = runProbe, .room = {.multiprocessors = 132, .blocksEach = 2}});
  }

  std::unique_ptr<FakeDevices> devices = makeFakeDevices();
};

INSTANTIATE_TYPED_TEST_SUITE_P(Fake, AcceleratorSuite, FakeKind);
INSTANTIATE_TYPED_TEST_SUITE_P(Fake, PeerMemorySuite, FakeKind);

class FakeDevicesTest : public ::testing::Test {
 protected:
  // Opens when the test says so, or at its end.
  struct Gate {
    std::promise<void> opened;
    std::shared_future<void> future = opened.get_future().share();
    bool isOpen = false;
    void open() {
      if (!std::exchange(isOpen, true)) opened.set_value();
    }
    ~Gate() { open(); }
  };
  void block(DeviceStream stream, Gate& gate) {
    EXPECT_OK(devices->enqueue(stream, [future = gate.future] { future.wait(); }));
  }
  StreamWord* newWord() {
    const auto memory = valueOf(devices->allocatePinned(sizeof(StreamWord)));
    return new (memory.data()) StreamWord(0);
  }

  const std::unique_ptr<FakeDevices> devices = makeFakeDevices();
  const DeviceStream stream = devices->defaultStream(0);
};

TEST_F(FakeDevicesTest, TasksRunInOrderOnAThreadOfTheStream) {
  std::vector<int> order;
  std::thread::id thread;
  for (int i = 0; i < 100; ++i) {
    EXPECT_OK(devices->enqueue(stream, [&, i] {
      order.push_back(i);
      thread = std::this_thread::get_id();
    }));
  }
  EXPECT_OK(devices->synchronize(stream));
  ASSERT_EQ(order.size(), 100u);
  EXPECT_TRUE(std::ranges::is_sorted(order));
  EXPECT_NE(thread, std::this_thread::get_id());
}

TEST_F(FakeDevicesTest, StreamsRunBesideEachOther) {
  Gate gate;
  const DeviceStream other = valueOf(devices->createStream(0));
  block(stream, gate);
  EXPECT_OK(devices->enqueue(other, [&] { gate.open(); }));
  EXPECT_OK(devices->synchronize(stream));
}

TEST_F(FakeDevicesTest, StreamsAreListedWithTheDefaultOneFirst) {
  const DeviceStream made = valueOf(devices->createStream(0));
  valueOf(devices->createStream(1));
  auto listed = devices->streams(0);
  ASSERT_EQ(listed.size(), 2u);
  EXPECT_EQ(listed[0].handle, devices->defaultStream(0).handle);
  EXPECT_EQ(listed[1].handle, made.handle);
  EXPECT_EQ(devices->streams(1).size(), 2u);
  devices->destroyStream(made);
  EXPECT_EQ(devices->streams(0).size(), 1u);
  EXPECT_EQ(devices->synchronize(made).code(), ErrorCode::kInvalidArgument);
  devices->destroyStream(stream);  // stays: it is the default one
  EXPECT_EQ(devices->streams(0).size(), 1u);
}

TEST_F(FakeDevicesTest, ADeviceIsSynchronizedWhileAStreamGoes) {
  Gate gate;
  const DeviceStream other = valueOf(devices->createStream(0));
  EXPECT_OK(devices->enqueue(stream, [&] {
    gate.future.wait();
    devices->destroyStream(other);
  }));
  EXPECT_OK(devices->inject({.call = "synchronize", .block = [&] { gate.open(); }}));
  EXPECT_OK(devices->synchronizeDevice(0));
  EXPECT_EQ(devices->streams(0).size(), 1u);
}

TEST_F(FakeDevicesTest, AStreamKeepsItsPriority) {
  const DeviceStream high = valueOf(devices->createStream(0, StreamPriority::kHigh)),
                     normal = valueOf(devices->createStream(0));
  EXPECT_EQ(devices->priorityOf(high), StreamPriority::kHigh);
  EXPECT_EQ(devices->priorityOf(normal), StreamPriority::kNormal);
}

TEST_F(FakeDevicesTest, AStreamIsIdleOnceItsWorkIsOver) {
  Gate gate;
  EXPECT_TRUE(devices->isIdle(stream));
  block(stream, gate);
  EXPECT_FALSE(devices->isIdle(stream));
  gate.open();
  EXPECT_TRUE(eventually([&] { return devices->isIdle(stream); }));
}

TEST_F(FakeDevicesTest, ATaskCannotWaitForItsOwnStream) {
  Status status;
  EXPECT_OK(devices->enqueue(stream, [&] { status = devices->synchronize(stream); }));
  EXPECT_OK(devices->synchronize(stream));
  EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
}

TEST_F(FakeDevicesTest, AnEventIsRecordedOnStreamsOfItsDevice) {
  const auto event = valueOf(devices->createEvent(0));
  EXPECT_EQ(event->record(devices->defaultStream(1)).code(), ErrorCode::kInvalidArgument);
  EXPECT_OK(event->record(stream));
  EXPECT_OK(event->block(devices->defaultStream(1)));
  EXPECT_OK(devices->synchronize(devices->defaultStream(1)));
}

TEST_F(FakeDevicesTest, AnEarlierRecordOfAnotherStreamIsStillWaitedFor) {
  Gate gate;
  std::atomic<bool> isOver{false}, wasOver{false};
  const DeviceStream first = valueOf(devices->createStream(0)),
                     second = valueOf(devices->createStream(0));
  const auto event = valueOf(devices->createEvent(0));
  block(first, gate);
  EXPECT_OK(devices->enqueue(first, [&] { isOver = true; }));
  EXPECT_OK(event->record(first));
  EXPECT_OK(event->block(stream));
  EXPECT_OK(devices->enqueue(stream, [&] { wasOver = isOver.load(); }));
  EXPECT_OK(event->record(second));  // happens before the first
  EXPECT_TRUE(eventually([&] { return valueOf(event->hasHappened()); }));
  EXPECT_FALSE(devices->isIdle(stream));
  gate.open();
  EXPECT_OK(devices->synchronize(stream));
  EXPECT_TRUE(wasOver);
}

TEST_F(FakeDevicesTest, RangesBeyondAnAllocationAreRefused) {
  const auto memory = valueOf(devices->allocate(0, 100));
  const auto pinned = valueOf(devices->allocatePinned(200));
  EXPECT_OK(devices->copy(stream, memory.data(), pinned.data(), 100));
  EXPECT_EQ(devices->copy(stream, memory.data(), pinned.data(), 101).code(),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(devices->copy(stream, pinned.data(), memory.data() + 1, 100).code(),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(valueOf(devices->placeOf(memory.data() + 100)).kind, MemoryKind::kHost);
}

TEST_F(FakeDevicesTest, AllocationsLieApart) {
  std::vector<std::span<std::byte>> all;
  for (int i = 0; i < 4; ++i) all.push_back(valueOf(devices->allocate(i % 2, 5000)));
  for (size_t i = 0; i < all.size(); ++i) std::memset(all[i].data(), int(i) + 1, all[i].size());
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].front(), std::byte(i + 1));
    EXPECT_EQ(all[i].back(), std::byte(i + 1));
  }
}

TEST_F(FakeDevicesTest, AWordLiesInPinnedMemory) {
  StreamWord word{0};
  EXPECT_EQ(devices->writeWord(stream, &word, 1).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(devices->awaitWord(stream, &word, 0).code(), ErrorCode::kInvalidArgument);
}

TEST_F(FakeDevicesTest, FreedMemoryGoesWhenStreamsHavePassed) {
  Gate gate;
  block(stream, gate);
  const auto memory = valueOf(devices->allocate(0, 4096));
  EXPECT_OK(devices->enqueue(stream, [=] { memory[0] = std::byte{1}; }));
  devices->free(memory);
  EXPECT_EQ(valueOf(devices->placeOf(memory.data())).kind, MemoryKind::kHost);
  gate.open();
  EXPECT_OK(devices->synchronize(stream));
  // mincore() fails for memory that is not mapped.
  EXPECT_TRUE(eventually([&] {
    unsigned char isResident = 0;
    return ::mincore(memory.data(), 4096, &isResident) != 0;
  }));
}

TEST_F(FakeDevicesTest, MemoryRunsOut) {
  devices->limitMemory(10000);
  const auto first = valueOf(devices->allocate(0, 6000));
  const auto second = devices->allocate(1, 6000);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.error().code, ErrorCode::kExhausted);
  EXPECT_NE(second.error().message.find("6000 of 10000"), std::string::npos);
  Gate gate;
  block(stream, gate);  // the room is there again at once
  devices->free(first);
  EXPECT_TRUE(devices->allocate(1, 10000).ok());
  EXPECT_EQ(devices->allocate(1, 0).status().code(), ErrorCode::kInvalidArgument);
}

TEST_F(FakeDevicesTest, TheNthCallFails) {
  EXPECT_OK(devices->inject({.call = "copy", .n = 2, .times = 2, .code = ErrorCode::kExhausted}));
  const auto pinned = valueOf(devices->allocatePinned(200));
  std::vector<ErrorCode> codes;
  for (int i = 0; i < 5; ++i)
    codes.push_back(devices->copy(stream, &pinned[0], &pinned[100], 10).code());
  const ErrorCode ok = ErrorCode::kOk, full = ErrorCode::kExhausted;
  EXPECT_EQ(codes, (std::vector{ok, full, full, ok, ok}));
  EXPECT_EQ(devices->inject({.call = "coppy"}).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(devices->inject({.call = "copy", .n = 0}).code(), ErrorCode::kInvalidArgument);
}

TEST_F(FakeDevicesTest, ItKnowsItsCallers) {
  const std::vector<std::string> before = devices->callers();
  auto thread = startThread("another-one", [&] { (void)devices->describe(0); });
  valueOf(std::move(thread)).join();
  std::vector<std::string> expected = before;
  expected.emplace_back("another-one");
  std::ranges::sort(expected);
  EXPECT_EQ(devices->callers(), expected);
}

// Calls every function that can fail, and returns the names of those that did with this code.
std::vector<std::string> failing(FakeDevices& devices, ErrorCode code,
                                 const std::function<void(const char*)>& before) {
  const DeviceStream stream = devices.defaultStream(0);
  const auto event = replayEvent(devices, 0);
  const auto pinned = valueOf(devices.allocatePinned(64));
  const auto memory = valueOf(devices.allocate(0, 64));
  auto* const word = reinterpret_cast<StreamWord*>(pinned.data());
  std::vector<std::string> found;
  const auto call = [&](const char* name, auto function) {
    before(name);
    if (function().code() == code) found.emplace_back(name);
  };
  call("placeOf", [&] { return devices.placeOf(word).status(); });
  call("allocatePinned", [&] { return devices.allocatePinned(1).status(); });
  call("createStream", [&] { return devices.createStream(0).status(); });
  call("synchronize", [&] { return devices.synchronize(stream); });
  call("createEvent", [&] { return devices.createEvent(0).status(); });
  call("record", [&] { return event->record(stream); });
  call("block", [&] { return event->block(stream); });
  call("hasHappened", [&] { return event->hasHappened().status(); });
  call("recordInReplays", [&] { return event->recordInReplays(stream); });
  call("blockInReplays", [&] { return event->blockInReplays(stream); });
  call("copy", [&] { return devices.copy(stream, word, word + 4, 4); });
  call("writeWord", [&] { return devices.writeWord(stream, word, 1); });
  call("awaitWord", [&] { return devices.awaitWord(stream, word, 0); });
  call("isCapturing", [&] { return devices.isCapturing(stream).status(); });
  call("exportMemory", [&] { return devices.exportMemory(memory.data()).status(); });
  call("importMemory", [&] { return devices.importMemory({}, 0).status(); });
  call("closeMemory", [&] { return devices.closeMemory(nullptr); });
  call("describe", [&] { return devices.describe(0).status(); });
  call("prepareKernels", [&] { return devices.prepareKernels(0); });
  call("roomFor", [&] { return devices.roomFor({}, 0).status(); });
  call("launch", [&] { return devices.launch(stream, {}); });
  PeerMemory& peers = *devices.peerMemory();
  call("checkSharing", [&] { return peers.checkSharing(0); });
  call("allocateShared", [&] { return peers.allocateShared(0, 1).status(); });
  call("mapShared", [&] { return peers.mapShared(Fd(), 1, 0).status(); });
  call("unmapShared", [&] { return peers.unmapShared({}); });
  call("canAccessPeer", [&] { return peers.canAccessPeer(0, 1).status(); });
  call("enqueue", [&] { return devices.enqueue(stream, [] {}); });
  call("allocate", [&] { return devices.allocate(0, 1).status(); });
  call("beginCapture", [&] { return devices.beginCapture(devices.defaultStream(1)); });
  call("endCapture", [&] { return devices.endCapture(devices.defaultStream(1)).status(); });
  call("replay", [&] { return devices.replay(0, stream); });
  return found;
}

TEST_F(FakeDevicesTest, EveryFunctionFailsIfATestWantsIt) {
  const auto found = failing(*devices, ErrorCode::kMinority, [&](const char* name) {
    EXPECT_OK(devices->inject({.call = name, .code = ErrorCode::kMinority}));
  });
  EXPECT_EQ(found.size(), 31u);
}

TEST_F(FakeDevicesTest, ALostContextFailsEveryCallForGood) {
  const auto found = failing(*devices, ErrorCode::kSystem, [&](const char* name) {
    if (std::string(name) == "placeOf") devices->loseContext();
  });
  EXPECT_EQ(found.size(), 31u);
}

TEST_F(FakeDevicesTest, ALostContextEndsWaitsAndDropsWork) {
  StreamWord* const word = newWord();
  const DeviceStream other = valueOf(devices->createStream(0));
  const auto event = valueOf(devices->createEvent(0));
  std::atomic<bool> hasRun{false};
  auto kept = std::make_shared<int>(0);
  EXPECT_OK(devices->awaitWord(stream, word, 1));
  EXPECT_OK(event->record(stream));
  EXPECT_OK(devices->enqueue(stream, [&hasRun, kept] { hasRun = true; }));
  EXPECT_OK(event->block(other));
  EXPECT_OK(devices->enqueue(other, [&hasRun, kept] { hasRun = true; }));
  auto waits = std::async(std::launch::async, [&] { return devices->synchronize(other); });
  devices->loseContext();
  EXPECT_EQ(waits.get().code(), ErrorCode::kSystem);
  EXPECT_TRUE(eventually([&] { return kept.use_count() == 1; }));
  EXPECT_FALSE(hasRun);
}

TEST_F(FakeDevicesTest, DestroyedDevicesDropWorkThatWaits) {
  StreamWord* const word = newWord();
  const DeviceStream other = valueOf(devices->createStream(1)),
                     gone = valueOf(devices->createStream(1));
  const auto event = valueOf(devices->createEvent(1));
  EXPECT_OK(devices->awaitWord(other, word, 1));
  EXPECT_OK(event->record(other));
  EXPECT_OK(event->block(stream));
  EXPECT_OK(devices->awaitWord(gone, word, 1));
  devices->destroyStream(gone);
  const auto memory = valueOf(devices->allocate(0, 64));
  std::shared_ptr<void> owned(memory.data(), [&, memory](void*) { devices->free(memory); });
  EXPECT_OK(devices->enqueue(stream, [owned = std::move(owned)] {}));
  // The fixture's end must not hang.
}

// A task may own objects that free memory of the devices as they go.
TEST_F(FakeDevicesTest, ATasksObjectsGoWithoutALockOfTheDevices) {
  int freed = 0;
  const auto owned = [&] {
    const auto memory = valueOf(devices->allocate(0, 64));
    return std::shared_ptr<std::byte>(memory.data(), [&, memory](std::byte*) {
      ++freed;
      devices->free(memory);
    });
  };
  EXPECT_OK(devices->beginCapture(stream));
  EXPECT_OK(devices->enqueue(stream, [memory = owned()] {}));
  EXPECT_FALSE(devices->synchronize(stream).ok());
  EXPECT_FALSE(devices->endCapture(stream).ok());
  EXPECT_EQ(freed, 1);
  const DeviceStream captured = valueOf(devices->createStream(0));
  EXPECT_OK(devices->beginCapture(captured));
  EXPECT_OK(devices->enqueue(captured, [memory = owned()] {}));
  devices->destroyStream(captured);
  EXPECT_EQ(freed, 2);
  EXPECT_FALSE(devices->enqueue(captured, [memory = owned()] {}).ok());
  EXPECT_EQ(freed, 3);
}

// ---- captures

TEST_F(FakeDevicesTest, ACaptureRunsNothingUntilItIsReplayed) {
  const auto pinned = valueOf(devices->allocatePinned(8));
  StreamWord* const word = newWord();
  int runs = 0;
  EXPECT_OK(devices->beginCapture(stream));
  EXPECT_TRUE(valueOf(devices->isCapturing(stream)));
  EXPECT_EQ(devices->beginCapture(stream).code(), ErrorCode::kInvalidArgument);
  EXPECT_OK(devices->enqueue(stream, [&] { ++runs; }));
  EXPECT_OK(devices->copy(stream, &pinned[4], &pinned[0], 4));
  EXPECT_OK(devices->writeWord(stream, word, 3));
  const uint64_t graph = valueOf(devices->endCapture(stream));
  EXPECT_FALSE(valueOf(devices->isCapturing(stream)));
  EXPECT_OK(devices->synchronize(stream));
  EXPECT_EQ(runs, 0);
  for (const std::byte value : {std::byte{5}, std::byte{6}}) {
    pinned[0] = value;
    word->store(0);
    EXPECT_OK(devices->replay(graph, devices->defaultStream(1)));
    EXPECT_OK(devices->synchronize(devices->defaultStream(1)));
    EXPECT_EQ(pinned[4], value);
    EXPECT_EQ(word->load(), 3u);
  }
  EXPECT_EQ(runs, 2);
  EXPECT_EQ(devices->replay(graph + 1, stream).code(), ErrorCode::kInvalidArgument);
}

TEST_F(FakeDevicesTest, AStreamJoinsACaptureByAnEvent) {
  const DeviceStream other = valueOf(devices->createStream(0));
  const auto forked = valueOf(devices->createEvent(0)), joined = valueOf(devices->createEvent(0)),
             early = valueOf(devices->createEvent(0));
  std::vector<int> order;
  EXPECT_OK(devices->beginCapture(stream));
  EXPECT_OK(devices->enqueue(stream, [&] { order.push_back(1); }));
  EXPECT_OK(forked->record(stream));
  EXPECT_FALSE(valueOf(devices->isCapturing(other)));
  EXPECT_OK(forked->block(other));
  EXPECT_TRUE(valueOf(devices->isCapturing(other)));
  EXPECT_OK(devices->enqueue(other, [&] { order.push_back(2); }));
  EXPECT_OK(early->record(other));
  EXPECT_OK(devices->enqueue(other, [&] { order.push_back(3); }));
  EXPECT_OK(joined->record(other));
  EXPECT_OK(joined->block(stream));
  EXPECT_OK(early->block(stream));  // takes nothing back
  EXPECT_OK(devices->enqueue(stream, [&] { order.push_back(4); }));
  EXPECT_EQ(devices->endCapture(other).status().code(), ErrorCode::kInvalidArgument);
  const uint64_t graph = valueOf(devices->endCapture(stream));
  EXPECT_FALSE(valueOf(devices->isCapturing(other)));
  EXPECT_EQ(forked->hasHappened().status().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(forked->block(other).code(), ErrorCode::kInvalidArgument);  // its capture is over
  EXPECT_OK(devices->replay(graph, stream));
  EXPECT_OK(devices->synchronize(stream));
  EXPECT_EQ(order, (std::vector{1, 2, 3, 4}));
  EXPECT_OK(forked->record(stream));
  EXPECT_TRUE(eventually([&] { return valueOf(forked->hasHappened()); }));
}

TEST_F(FakeDevicesTest, WorkThatDoesNotComeBackSpoilsACapture) {
  const DeviceStream other = valueOf(devices->createStream(0));
  const auto forked = valueOf(devices->createEvent(0)), joined = valueOf(devices->createEvent(0));
  EXPECT_OK(devices->beginCapture(stream));
  EXPECT_OK(forked->record(stream));
  EXPECT_OK(forked->block(other));
  EXPECT_OK(devices->enqueue(other, [] {}));
  EXPECT_OK(joined->record(other));
  EXPECT_OK(devices->enqueue(other, [] {}));  // after the record
  EXPECT_OK(joined->block(stream));
  const auto graph = devices->endCapture(stream);
  ASSERT_FALSE(graph.ok());
  EXPECT_NE(graph.error().message.find("stream 1 of fake device 0"), std::string::npos);
  EXPECT_FALSE(valueOf(devices->isCapturing(other)));
}

TEST_F(FakeDevicesTest, AnEventFromOutsideSpoilsACapture) {
  const auto event = valueOf(devices->createEvent(0));
  EXPECT_OK(event->record(devices->defaultStream(0)));
  EXPECT_OK(devices->beginCapture(stream));
  EXPECT_EQ(event->block(stream).code(), ErrorCode::kInvalidArgument);
  EXPECT_FALSE(devices->endCapture(stream).ok());
}

TEST_F(FakeDevicesTest, AWaitOfTheHostSpoilsACapture) {
  EXPECT_OK(devices->beginCapture(stream));
  EXPECT_EQ(devices->synchronize(stream).code(), ErrorCode::kInvalidArgument);
  EXPECT_FALSE(devices->endCapture(stream).ok());
  EXPECT_OK(devices->beginCapture(stream));
  EXPECT_EQ(devices->synchronizeDevice(0).code(), ErrorCode::kInvalidArgument);
  EXPECT_OK(devices->synchronizeDevice(1));
  EXPECT_FALSE(devices->endCapture(stream).ok());
  EXPECT_OK(devices->synchronize(stream));
}

TEST_F(FakeDevicesTest, AnEventOrdersReplaysAndOtherWork) {
  StreamWord* const word = newWord();
  const auto event = replayEvent(*devices, 0);
  std::vector<int> order;
  EXPECT_EQ(event->blockInReplays(stream).code(), ErrorCode::kInvalidArgument);  // none is on
  EXPECT_EQ(event->recordInReplays(stream).code(), ErrorCode::kInvalidArgument);
  EXPECT_OK(devices->beginCapture(stream));
  EXPECT_OK(event->blockInReplays(stream));
  EXPECT_OK(devices->enqueue(stream, [&] { order.push_back(2); }));
  EXPECT_OK(event->recordInReplays(stream));
  const uint64_t graph = valueOf(devices->endCapture(stream));
  EXPECT_TRUE(valueOf(event->hasHappened()));  // no replay has recorded it

  const DeviceStream others[] = {valueOf(devices->createStream(0)),
                                 valueOf(devices->createStream(0))};
  EXPECT_OK(devices->awaitWord(stream, word, 1));
  EXPECT_OK(devices->enqueue(stream, [&] { order.push_back(1); }));
  EXPECT_OK(event->record(stream));
  EXPECT_OK(devices->replay(graph, others[0]));
  EXPECT_OK(event->block(stream));
  EXPECT_OK(devices->enqueue(stream, [&] { order.push_back(3); }));
  EXPECT_OK(event->record(stream));
  EXPECT_OK(devices->replay(graph, others[1]));
  EXPECT_OK(devices->replay(graph, others[0]));
  EXPECT_FALSE(valueOf(event->hasHappened()));
  word->store(1);
  EXPECT_TRUE(eventually([&] { return valueOf(event->hasHappened()); }));
  EXPECT_EQ(order, (std::vector{1, 2, 3, 2, 2}));
}

// ---- processes

TEST_F(FakeDevicesTest, AForkedChildIsRefused) {
  Gate gate;
  block(stream, gate);
  const pid_t child = ::fork();
  if (child == 0) {
    const bool isRefused = devices->synchronize(stream).code() == ErrorCode::kAborted &&
                           devices->allocate(0, 1).status().code() == ErrorCode::kAborted &&
                           devices->streams(0).empty();
    ::_exit(isRefused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// The parent exports memory, this process writes to it.
TEST(FakeDevicesProcess, DISABLED_Importer) {
  if (!ChildProcess::isChild()) GTEST_SKIP();
  const Bytes message = receiveMessage(ChildProcess::kFromParent);
  ByteReader in(message);
  ExportedMemory memory{.handle = in.getString(64)};
  memory.offset = in.get<uint64_t>();
  memory.bytes = in.get<uint64_t>();
  ASSERT_TRUE(in.finish("exported memory").ok());
  const auto imported = valueOf(fakeDevices().importMemory(memory, 1));
  ASSERT_NE(imported, nullptr);
  const auto place = valueOf(fakeDevices().placeOf(imported));
  EXPECT_EQ(place.kind, MemoryKind::kDevice);
  EXPECT_EQ(place.device, 1);
  EXPECT_EQ(std::memcmp(imported, "from the parent", 16), 0);
  const auto answer = valueOf(fakeDevices().allocatePinned(16));
  std::memcpy(answer.data(), "from the child!", 16);
  const DeviceStream stream = fakeDevices().defaultStream(1);
  EXPECT_EQ(fakeDevices().copy(stream, imported, answer.data(), memory.bytes + 1).code(),
            ErrorCode::kInvalidArgument);
  EXPECT_OK(fakeDevices().copy(stream, imported, answer.data(), 16));
  EXPECT_OK(fakeDevices().synchronize(stream));
  auto* const beside = static_cast<std::byte*>(imported) + 1;
  EXPECT_EQ(fakeDevices().closeMemory(beside).code(), ErrorCode::kInvalidArgument);
  EXPECT_OK(fakeDevices().closeMemory(imported));
  EXPECT_EQ(fakeDevices().closeMemory(imported).code(), ErrorCode::kInvalidArgument);
  sendMessage(ChildProcess::kToParent, Bytes(1));
}

Bytes messageOf(const ExportedMemory& memory) {
  return ByteWriter().putString(memory.handle).put(memory.offset).put(memory.bytes).take();
}

TEST_F(FakeDevicesTest, ExportedMemoryIsSharedBetweenProcesses) {
  valueOf(devices->allocate(0, 4096));
  const auto memory = valueOf(devices->allocate(0, 10000));
  std::memcpy(&memory[5000], "from the parent", 16);
  const auto exported = valueOf(devices->exportMemory(&memory[5000]));
  EXPECT_EQ(exported.bytes, 5000u);
  EXPECT_EQ(devices->importMemory(exported, 0).status().code(), ErrorCode::kInvalidArgument);
  ChildProcess child("FakeDevicesProcess.DISABLED_Importer");
  child.send(messageOf(exported));
  EXPECT_EQ(child.receive().size(), 1u);
  EXPECT_EQ(std::memcmp(&memory[5000], "from the child!", 16), 0);
  EXPECT_EQ(child.finish(), 0);
}

TEST_F(FakeDevicesTest, AHandleOfAnEndedProcessIsRefused) {
  const auto memory = valueOf(devices->allocate(0, 4096));
  auto exported = valueOf(devices->exportMemory(memory.data()));
  const auto setProcess = [&](int32_t process) {
    std::memcpy(exported.handle.data(), &process, sizeof(process));
  };
  setProcess(0x7fffffff);
  EXPECT_EQ(devices->importMemory(exported, 0).status().code(), ErrorCode::kSystem);
  // Another process, which has another file under the number.
  ChildProcess child("FakeDevicesProcess.DISABLED_Importer");
  setProcess(child.pid());
  const int32_t number = ChildProcess::kFromParent;
  std::memcpy(&exported.handle[4], &number, sizeof(number));
  EXPECT_EQ(devices->importMemory(exported, 0).status().code(), ErrorCode::kInvalidArgument);
  exported.handle.pop_back();
  EXPECT_EQ(devices->importMemory(exported, 0).status().code(), ErrorCode::kProtocol);
}

// A stream that waits for a word must not keep the process from its end.
TEST(FakeDevicesProcess, DISABLED_EndsWhileAStreamWaits) {
  if (!ChildProcess::isChild()) GTEST_SKIP();
  const auto memory = valueOf(fakeDevices().allocatePinned(sizeof(StreamWord)));
  const DeviceStream stream = fakeDevices().defaultStream(0);
  auto* const word = new (memory.data()) StreamWord(0);
  EXPECT_OK(fakeDevices().awaitWord(stream, word, 1));
  EXPECT_OK(fakeDevices().enqueue(stream, [] { std::abort(); }));
}

TEST(FakeDevicesProcess, AWaitingStreamDoesNotKeepAProcess) {
  ChildProcess child("FakeDevicesProcess.DISABLED_EndsWhileAStreamWaits");
  EXPECT_EQ(child.finish(), 0);
}

}  // namespace
}  // namespace mooncake::testing
