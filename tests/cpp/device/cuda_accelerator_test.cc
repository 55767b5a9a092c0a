#include <gtest/gtest.h>

#ifdef MOONCAKE_WITH_CUDA
#include <sys/wait.h>
#include <unistd.h>

#include "device/accelerator_suite.h"
#include "device/cuda/cuda_accelerator.h"
#include "device/pinned_pool.h"
#include "device/scripted_driver.h"

namespace mooncake::testing {
namespace {

constexpr CUdeviceptr kMemory = 0x10000;  // of device 0

class CudaAcceleratorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    driver.memory[kMemory] = {.device = 0, .bytes = 0x1000};
    open();
  }
  void open() {
    auto made = CudaAccelerator::make(driver.table, {});
    ASSERT_TRUE(made.ok()) << made.error().message;
    cuda = std::move(*made);
  }
  static void* at(CUdeviceptr address) { return reinterpret_cast<void*>(address); }
  static DeviceStream streamOf(int device, uintptr_t handle = 0x40) {
    return {.device = device,
            .handle = reinterpret_cast<void*>(handle + static_cast<uintptr_t>(device))};
  }
  Status copy(DeviceStream stream) { return cuda->copy(stream, at(kMemory), at(kMemory + 64), 64); }
  // The program has used the device.
  void use(int device) { driver.active.insert(device); }

  ScriptedDriver driver;
  std::unique_ptr<CudaAccelerator> cuda;
};

using Calls = std::vector<std::string>;

// ---- opening

TEST_F(CudaAcceleratorTest, OpeningMakesNoContext) {
  EXPECT_EQ(driver.take(), (Calls{"cuInit in -", "cuDeviceGetCount in -", "cuDeviceGet in -",
                                  "cuDeviceGet in -"}));
  EXPECT_EQ(cuda->deviceCount(), 2);
  EXPECT_STREQ(cuda->name(), "cuda");
}

TEST_F(CudaAcceleratorTest, ADriverWithoutADeviceIsUnsupported) {
  driver.results["cuInit"] = CUDA_ERROR_NO_DEVICE;
  auto made = CudaAccelerator::make(driver.table, {});
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(made.error().message, "cuda: cuInit: CUDA_ERROR_OTHER (as the driver says it)");
  driver.results.clear();
  driver.devices = 0;
  EXPECT_EQ(CudaAccelerator::make(driver.table, {}).status().code(), ErrorCode::kUnsupported);
}

// ---- contexts

TEST_F(CudaAcceleratorTest, ACallHasTheStreamsContextAndPutsTheThreadsOwnBack) {
  driver.stack = {ScriptedDriver::contextOf(0)};
  use(1);
  driver.take();
  EXPECT_OK(copy(streamOf(1)));
  EXPECT_EQ(driver.take(),
            (Calls{"cuDevicePrimaryCtxRetain in 0", "cuCtxGetCurrent in 0", "cuCtxPushCurrent in 0",
                   "cuThreadExchangeStreamCaptureMode in 1", "cuMemcpyAsync in 1",
                   "cuThreadExchangeStreamCaptureMode in 1", "cuCtxPopCurrent in 1"}));
  EXPECT_EQ(driver.stack, std::vector{ScriptedDriver::contextOf(0)});
  EXPECT_EQ(driver.captureMode, CU_STREAM_CAPTURE_MODE_GLOBAL);
  // Retained once, and not pushed if it is current.
  driver.stack = {ScriptedDriver::contextOf(1)};
  EXPECT_OK(copy(streamOf(1)));
  EXPECT_EQ(driver.take(), (Calls{"cuCtxGetCurrent in 1", "cuThreadExchangeStreamCaptureMode in 1",
                                  "cuMemcpyAsync in 1", "cuThreadExchangeStreamCaptureMode in 1"}));
}

TEST_F(CudaAcceleratorTest, TheThreadsContextComesBackAfterAnError) {
  driver.stack = {ScriptedDriver::contextOf(0)};
  for (const char* function :
       {"cuMemcpyAsync", "cuThreadExchangeStreamCaptureMode", "cuCtxPushCurrent"}) {
    driver.results = {{function, CUDA_ERROR_INVALID_VALUE}};
    const Status status = copy(streamOf(1));
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(status.error().message.find(function), std::string::npos);
    EXPECT_EQ(driver.stack, std::vector{ScriptedDriver::contextOf(0)});
    EXPECT_EQ(driver.captureMode, CU_STREAM_CAPTURE_MODE_GLOBAL);
  }
}

TEST_F(CudaAcceleratorTest, NoContextIsMadeOnADeviceThatTheProgramDoesNotUse) {
  use(0);
  const ExportedMemory memory{.handle = std::string(64, 'x')};
  EXPECT_EQ(cuda->createStream(1).status().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(cuda->createEvent(1).status().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(cuda->importMemory(memory, 1).status().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(driver.countOf("cuDevicePrimaryCtxRetain"), 0);
  EXPECT_TRUE(cuda->createStream(0).ok());
  EXPECT_EQ(driver.countOf("cuDevicePrimaryCtxRetain"), 1);
  EXPECT_FALSE(driver.active.contains(1));
  // A stream of the program shows that it uses the device.
  EXPECT_OK(copy(streamOf(1)));
  EXPECT_TRUE(cuda->createStream(1).ok());
}

TEST_F(CudaAcceleratorTest, PinnedMemoryNeedsADeviceInUse) {
  EXPECT_EQ(cuda->allocatePinned(64).status().code(), ErrorCode::kInvalidArgument);
  EXPECT_TRUE(driver.active.empty());
  use(1);
  driver.take();
  EXPECT_TRUE(cuda->allocatePinned(64).ok());
  EXPECT_EQ(driver.countOf("cuMemHostAlloc"), 1);
  EXPECT_EQ(driver.active, std::set{1});
  // The thread's own device comes first.
  use(0);
  driver.stack = {ScriptedDriver::contextOf(1)};
  driver.take();
  EXPECT_TRUE(cuda->allocatePinned(64).ok());
  EXPECT_EQ(driver.countOf("cuCtxPushCurrent"), 0);
  EXPECT_EQ(driver.hostFlags, unsigned(CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
}

// ---- streams

TEST_F(CudaAcceleratorTest, AStreamHasAPriority) {
  use(0);
  for (const auto& [priority, level] :
       {std::pair(StreamPriority::kNormal, 0), {StreamPriority::kHigh, -5}}) {
    EXPECT_TRUE(cuda->createStream(0, priority).ok());
    EXPECT_EQ(driver.streamPriority, level);
    EXPECT_EQ(driver.streamFlags, unsigned(CU_STREAM_NON_BLOCKING));
  }
  driver.greatestPriority = 0;  // a device without priorities
  EXPECT_TRUE(cuda->createStream(0, StreamPriority::kHigh).ok());
  EXPECT_EQ(driver.streamPriority, 0);
  driver.results["cuCtxGetStreamPriorityRange"] = CUDA_ERROR_ILLEGAL_ADDRESS;
  EXPECT_EQ(cuda->createStream(0, StreamPriority::kHigh).status().code(), ErrorCode::kSystem);
}

// ---- memory

TEST_F(CudaAcceleratorTest, TheOrderOfCardsWritesIsThatOfTheDevice) {
  constexpr auto kOrdering = CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING;
  for (const auto& [scope, isOrdered] : {std::pair(CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE, false),
                                         {CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER, true},
                                         {CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES, true}}) {
    driver.attributes[kOrdering] = scope;
    EXPECT_EQ(cuda->ordersCardWrites(0), isOrdered) << scope;
  }
  EXPECT_FALSE(cuda->ordersCardWrites(2));  // no such device
  driver.unknownAttributes = {kOrdering};   // of an old driver
  EXPECT_FALSE(cuda->ordersCardWrites(0));
  EXPECT_TRUE(driver.active.empty());
}

TEST_F(CudaAcceleratorTest, TheKindOfMemoryIsKnownWithoutAContext) {
  driver.memory[0x20000] = {.device = 1, .bytes = 16};
  driver.memory[0x30000] = {.type = CU_MEMORYTYPE_HOST, .bytes = 16};
  driver.take();
  EXPECT_EQ(valueOf(cuda->placeOf(at(0x2000f))).kind, MemoryKind::kDevice);
  EXPECT_EQ(valueOf(cuda->placeOf(at(0x2000f))).device, 1);
  EXPECT_EQ(valueOf(cuda->placeOf(at(0x30008))).kind, MemoryKind::kPinned);
  EXPECT_EQ(valueOf(cuda->placeOf(at(0x30008))).device, -1);
  EXPECT_EQ(valueOf(cuda->placeOf(at(0x40000))).kind, MemoryKind::kHost);
  EXPECT_EQ(valueOf(cuda->placeOf(at(0x40000))).device, -1);
  EXPECT_EQ(driver.take(), Calls(6, "cuPointerGetAttributes in -"));
  driver.results["cuPointerGetAttributes"] = CUDA_ERROR_DEINITIALIZED;
  EXPECT_EQ(cuda->placeOf(at(0x40000)).status().code(), ErrorCode::kSystem);
}

// A driver may answer only threads with a current context.
TEST_F(CudaAcceleratorTest, AThreadWithoutAContextLearnsTheKindOfMemory) {
  driver.needsContext = {"cuPointerGetAttributes"};
  driver.take();
  EXPECT_EQ(valueOf(cuda->placeOf(at(kMemory))).kind, MemoryKind::kHost);  // no context at all
  EXPECT_EQ(driver.countOf("cuDevicePrimaryCtxRetain"), 0);
  use(1);
  EXPECT_EQ(valueOf(cuda->placeOf(at(kMemory))).kind, MemoryKind::kDevice);
  EXPECT_EQ(valueOf(cuda->placeOf(at(0x40000))).kind, MemoryKind::kHost);
  EXPECT_EQ(cuda->exportMemory(at(0x40000)).status().code(), ErrorCode::kUnsupported);
  EXPECT_TRUE(driver.stack.empty());
  EXPECT_EQ(driver.active, std::set{1});
  // The answer within a context is final.
  driver.results["cuPointerGetAttributes"] = CUDA_ERROR_INVALID_CONTEXT;
  EXPECT_EQ(cuda->placeOf(at(kMemory)).status().code(), ErrorCode::kSystem);
  driver.results = {{"cuCtxGetCurrent", CUDA_ERROR_DEINITIALIZED}};
  EXPECT_EQ(cuda->placeOf(at(kMemory)).status().code(), ErrorCode::kSystem);
}

TEST_F(CudaAcceleratorTest, ACopyOfNothingAsksTheDriverForNothing) {
  EXPECT_OK(cuda->copy(streamOf(0), at(kMemory), at(kMemory + 8), 24));
  EXPECT_OK(cuda->copy(streamOf(0), nullptr, nullptr, 0));
  ASSERT_EQ(driver.copies.size(), 1u);
  EXPECT_EQ(driver.copies[0].to, kMemory);
  EXPECT_EQ(driver.copies[0].from, kMemory + 8);
  EXPECT_EQ(driver.copies[0].bytes, 24u);
}

TEST_F(CudaAcceleratorTest, MemoryIsExportedFromItsAllocationsStart) {
  use(0);
  const auto exported = valueOf(cuda->exportMemory(at(kMemory + 0x100)));
  EXPECT_EQ(exported.offset, 0x100u);
  EXPECT_EQ(exported.bytes, 0xf00u);
  CUdeviceptr start = 0;
  ASSERT_EQ(exported.handle.size(), 64u);
  std::memcpy(&start, exported.handle.data(), sizeof(start));
  EXPECT_EQ(start, kMemory);
}

TEST_F(CudaAcceleratorTest, MemoryThatCannotBeExportedSaysWhy) {
  use(0);
  driver.memory[0x20000] = {.device = 0, .bytes = 16, .isExportable = false};
  driver.memory[0x30000] = {.type = CU_MEMORYTYPE_HOST, .bytes = 16};
  const auto pool = cuda->exportMemory(at(0x20000));
  ASSERT_FALSE(pool.ok());
  EXPECT_EQ(pool.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(pool.error().message.find("expandable_segments"), std::string::npos);
  for (const CUdeviceptr host : {0x30000, 0x40000})
    EXPECT_EQ(cuda->exportMemory(at(host)).status().code(), ErrorCode::kUnsupported);
  EXPECT_EQ(driver.countOf("cuIpcGetMemHandle"), 0);
}

TEST_F(CudaAcceleratorTest, AnAllocationIsImportedOnceForEachOfItsParts) {
  use(0);
  ExportedMemory memory{.handle = std::string(64, '\0'), .offset = 0x100, .bytes = 0xf00};
  std::memcpy(memory.handle.data(), &kMemory, sizeof(kMemory));
  const CUdeviceptr start = kMemory + 0x1'0000'0000;
  void* const first = valueOf(cuda->importMemory(memory, 0));
  EXPECT_EQ(first, at(start + 0x100));
  memory.offset = 0x200;
  memory.bytes = 0xe00;
  void* const second = valueOf(cuda->importMemory(memory, 0));
  EXPECT_EQ(second, at(start + 0x200));
  EXPECT_EQ(driver.importFlags, unsigned(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  EXPECT_EQ(cuda->closeMemory(at(start - 1)).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(cuda->closeMemory(at(start + 0x1000)).code(), ErrorCode::kInvalidArgument);
  EXPECT_OK(cuda->closeMemory(first));
  EXPECT_EQ(driver.imports[start], 1);
  EXPECT_OK(cuda->closeMemory(second));
  EXPECT_EQ(driver.imports[start], 0);
  EXPECT_EQ(cuda->closeMemory(second).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(driver.imports[start], 0);
}

TEST_F(CudaAcceleratorTest, ImportsThatFailAreNotOpen) {
  use(0);
  EXPECT_EQ(cuda->importMemory({.handle = "short"}, 0).status().code(),
            ErrorCode::kInvalidArgument);
  driver.results["cuIpcOpenMemHandle"] = CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  EXPECT_EQ(cuda->importMemory({.handle = std::string(64, 'x')}, 0).status().code(),
            ErrorCode::kUnsupported);
  EXPECT_EQ(cuda->closeMemory(nullptr).code(), ErrorCode::kInvalidArgument);
}

// ---- streams, events, words

TEST_F(CudaAcceleratorTest, AStreamIsOfNoDefaultStreamsOrder) {
  use(0);
  const auto stream = valueOf(cuda->createStream(0));
  EXPECT_EQ(driver.streamFlags, unsigned(CU_STREAM_NON_BLOCKING));
  EXPECT_OK(cuda->synchronize(stream));
  cuda->destroyStream(stream);
  EXPECT_EQ(driver.countOf("cuStreamDestroy"), 1);
}

TEST_F(CudaAcceleratorTest, AnEventHappensOnceTheStreamIsThere) {
  use(0);
  {
    const auto event = valueOf(cuda->createEvent(0));
    EXPECT_EQ(driver.eventFlags, unsigned(CU_EVENT_DISABLE_TIMING));
    driver.busy.insert(static_cast<CUstream>(streamOf(0).handle));
    EXPECT_OK(event->record(streamOf(0)));
    EXPECT_FALSE(valueOf(event->hasHappened()));
    driver.busy.clear();
    EXPECT_TRUE(valueOf(event->hasHappened()));
    driver.take();
    EXPECT_OK(event->block(streamOf(1)));
    EXPECT_EQ(driver.calls[driver.calls.size() - 3], "cuStreamWaitEvent in 1");
    driver.results["cuEventQuery"] = CUDA_ERROR_CAPTURED_EVENT;
    EXPECT_EQ(event->hasHappened().status().code(), ErrorCode::kInvalidArgument);
  }
  EXPECT_EQ(driver.countOf("cuEventDestroy"), 1);
}

TEST_F(CudaAcceleratorTest, AnEventOfReplaysIsExternalToTheGraph) {
  use(0);
  const auto event = replayEvent(*cuda, 0);
  EXPECT_OK(event->blockInReplays(streamOf(0)));
  EXPECT_OK(event->recordInReplays(streamOf(0)));
  EXPECT_EQ(driver.countOf("cuStreamWaitEvent external"), 1);
  EXPECT_EQ(driver.countOf("cuEventRecordWithFlags external"), 1);
}

TEST_F(CudaAcceleratorTest, WordsAreComparedAsNumbersThatWrap) {
  use(0);
  EXPECT_TRUE(cuda->hasStreamWords(1));
  EXPECT_FALSE(cuda->hasStreamWords(2));
  auto* const word = reinterpret_cast<StreamWord*>(valueOf(cuda->allocatePinned(64)).data());
  EXPECT_OK(cuda->writeWord(streamOf(0), word, 7));
  EXPECT_OK(cuda->awaitWord(streamOf(0), word + 1, 8));
  ASSERT_EQ(driver.writes.size(), 1u);
  EXPECT_EQ(driver.writes[0].address, reinterpret_cast<CUdeviceptr>(word));
  EXPECT_EQ(driver.writes[0].value, 7u);
  EXPECT_EQ(driver.writes[0].flags, unsigned(CU_STREAM_WRITE_VALUE_DEFAULT));
  ASSERT_EQ(driver.waits.size(), 1u);
  EXPECT_EQ(driver.waits[0].address, reinterpret_cast<CUdeviceptr>(word + 1));
  EXPECT_EQ(driver.waits[0].value, 8u);
  EXPECT_EQ(driver.waits[0].flags, unsigned(CU_STREAM_WAIT_VALUE_GEQ));
  driver.results["cuStreamWaitValue32"] = CUDA_ERROR_NOT_SUPPORTED;
  EXPECT_EQ(cuda->awaitWord(streamOf(0), word, 1).code(), ErrorCode::kUnsupported);
}

TEST_F(CudaAcceleratorTest, ACaptureIsSeen) {
  EXPECT_FALSE(valueOf(cuda->isCapturing(streamOf(0))));
  driver.capturing.insert(static_cast<CUstream>(streamOf(0).handle));
  EXPECT_TRUE(valueOf(cuda->isCapturing(streamOf(0))));
  EXPECT_FALSE(valueOf(cuda->isCapturing(streamOf(1))));
}

TEST_F(CudaAcceleratorTest, WordsAreRecordedIntoAGraphOfItsOwnFirst) {
  use(0);
  EXPECT_OK(cuda->checkRecordedWords(0));
  for (const char* function :
       {"cuStreamBeginCapture", "cuStreamWriteValue32", "cuStreamWaitValue32", "cuStreamEndCapture",
        "cuGraphDestroy", "cuStreamDestroy"})
    EXPECT_EQ(driver.countOf(function), 1) << function;
  driver.graphNodes = 1;
  EXPECT_EQ(cuda->checkRecordedWords(0).code(), ErrorCode::kUnsupported);
  driver.graphNodes = 2;
  for (const char* function : {"cuStreamWaitValue32", "cuStreamEndCapture"}) {
    driver.results[function] = CUDA_ERROR_NOT_SUPPORTED;
    EXPECT_EQ(cuda->checkRecordedWords(0).code(), ErrorCode::kUnsupported) << function;
    driver.results.erase(function);
    EXPECT_TRUE(driver.capturing.empty());
  }
  EXPECT_EQ(driver.countOf("cuStreamDestroy"), 4);
}

// ---- errors

TEST_F(CudaAcceleratorTest, ALostContextSaysSoForGoodAndAsksTheDriverNoMore) {
  use(0);
  use(1);
  const auto event = valueOf(cuda->createEvent(0));
  const auto pinned = valueOf(cuda->allocatePinned(64));
  driver.results["cuMemcpyAsync"] = CUDA_ERROR_ILLEGAL_ADDRESS;
  const Status first = copy(streamOf(0));
  EXPECT_EQ(first.code(), ErrorCode::kSystem);
  for (const char* part : {"device 0", "cuMemcpyAsync", "CUDA_ERROR_ILLEGAL_ADDRESS",
                           "as the driver says it", "lost, for good"})
    EXPECT_NE(first.error().message.find(part), std::string::npos) << part;
  driver.results.clear();
  driver.take();
  auto* const word = reinterpret_cast<StreamWord*>(pinned.data());
  for (const Status& later :
       {copy(streamOf(0)), cuda->synchronize(streamOf(0)), event->record(streamOf(0)),
        event->block(streamOf(0)), event->hasHappened().status(), cuda->createStream(0).status(),
        cuda->createEvent(0).status(), cuda->writeWord(streamOf(0), word, 1),
        cuda->awaitWord(streamOf(0), word, 1), cuda->isCapturing(streamOf(0)).status(),
        cuda->importMemory({.handle = std::string(64, 'x')}, 0).status()}) {
    EXPECT_EQ(later.code(), ErrorCode::kSystem);
    EXPECT_EQ(later.error().message, first.error().message);
  }
  EXPECT_EQ(driver.take(), Calls{});
  EXPECT_OK(copy(streamOf(1)));
}

TEST_F(CudaAcceleratorTest, OnlyErrorsThatLoseAContextStay) {
  for (const int error :
       {700, 719, 214, 220, 226, 702, 709, 710, 714, 715, 716, 717, 718, 721, 810, 911}) {
    open();
    driver.results["cuStreamSynchronize"] = error;
    EXPECT_EQ(cuda->synchronize(streamOf(0)).code(), ErrorCode::kSystem) << error;
    driver.results.clear();
    EXPECT_EQ(cuda->synchronize(streamOf(0)).code(), ErrorCode::kSystem) << error;
  }
  for (const auto& [error, code] : std::map<int, ErrorCode>{{1, ErrorCode::kInvalidArgument},
                                                            {2, ErrorCode::kExhausted},
                                                            {801, ErrorCode::kUnsupported},
                                                            {900, ErrorCode::kInvalidArgument},
                                                            {999, ErrorCode::kSystem},
                                                            {4711, ErrorCode::kSystem}}) {
    open();
    driver.results["cuStreamSynchronize"] = error;
    EXPECT_EQ(cuda->synchronize(streamOf(0)).code(), code) << error;
    driver.results.clear();
    EXPECT_OK(cuda->synchronize(streamOf(0)));
  }
}

TEST_F(CudaAcceleratorTest, AnErrorThatTheDriverDoesNotKnowHasItsNumber) {
  driver.results["cuStreamSynchronize"] = 4711;
  EXPECT_EQ(cuda->synchronize(streamOf(0)).error().message,
            "cuda: cuStreamSynchronize on device 0: error 4711");
}

// CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER, for which cuda.h of CUDA 12.8 has no name.
TEST_F(CudaAcceleratorTest, ACallThatNeedsANewerDriverIsUnsupported) {
  const auto newer = static_cast<CUresult>(36);
  driver.unnamed = {36};
  StreamWord word{0};
  driver.results = {{"cuStreamWriteValue32", newer}, {"cuIpcOpenMemHandle", newer}};
  use(0);
  const ExportedMemory memory{.handle = std::string(64, 'x')};
  for (const auto& [function, status] : std::map<std::string, Status>{
           {"cuStreamWriteValue32", cuda->writeWord(streamOf(0), &word, 1)},
           {"cuIpcOpenMemHandle", cuda->importMemory(memory, 0).status()}}) {
    EXPECT_EQ(status.code(), ErrorCode::kUnsupported);
    EXPECT_EQ(status.error().message,
              "cuda: " + function +
                  " on device 0: error 36: the CUDA driver is too old for this call. Install a "
                  "newer one");
  }
  driver.results.clear();
  EXPECT_OK(cuda->writeWord(streamOf(0), &word, 1));
}

TEST_F(CudaAcceleratorTest, ADeviceThatIsNotThereIsRefused) {
  for (const int device : {-1, 2}) {
    EXPECT_EQ(copy(streamOf(device)).code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(cuda->createStream(device).status().code(), ErrorCode::kInvalidArgument);
  }
}

TEST_F(CudaAcceleratorTest, AForkedChildCallsNothing) {
  use(0);
  auto event = valueOf(cuda->createEvent(0));
  const auto pinned = valueOf(cuda->allocatePinned(64));
  const pid_t child = ::fork();
  if (child == 0) {
    driver.take();
    const ErrorCode aborted = ErrorCode::kAborted;
    bool isRefused = copy(streamOf(0)).code() == aborted &&
                     cuda->placeOf(nullptr).status().code() == aborted &&
                     cuda->allocatePinned(1).status().code() == aborted &&
                     cuda->exportMemory(at(kMemory)).status().code() == aborted &&
                     cuda->createEvent(0).status().code() == aborted;
    cuda->freePinned(pinned);
    cuda->destroyStream(streamOf(0));
    event.reset();
    isRefused = isRefused && driver.calls.empty();
    ::_exit(isRefused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// ---- the pool of pinned memory

class CudaPinnedTest : public CudaAcceleratorTest {
 protected:
  void SetUp() override {
    CudaAcceleratorTest::SetUp();
    use(0);
    use(1);
  }
  std::span<std::byte> allocate(size_t bytes = 4096) {
    return valueOf(cuda->allocatePinned(bytes));
  }
  static CUstream handle(DeviceStream stream) { return static_cast<CUstream>(stream.handle); }
};

TEST_F(CudaPinnedTest, AFreedBlockIsGivenOutAgain) {
  const auto first = allocate(5000);
  EXPECT_EQ(first.size(), 5000u);
  cuda->freePinned(first);
  EXPECT_NE(allocate(100).data(), first.data());  // has a smaller size
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(allocate(8192).data(), first.data());
    cuda->freePinned(first);
  }
  EXPECT_EQ(allocate(8192).data(), first.data());
  EXPECT_NE(allocate(8192).data(), first.data());
  EXPECT_EQ(driver.countOf("cuMemHostAlloc"), 3);
  EXPECT_EQ(driver.countOf("cuEventCreate"), 0);  // no stream used it
}

// The pool of the streams rounds up to eighths of a power of two, and the driver's adds nothing.
TEST_F(CudaPinnedTest, MemoryIsRoundedUpOnce) {
  constexpr size_t kMiB = size_t(1) << 20;
  PinnedPool pool(*cuda, 0, 0);
  std::vector<PinnedPool::Piece> pieces;
  for (const auto& [wanted, pinned] : {std::pair(size_t(1), size_t(4096)),
                                       {kMiB, kMiB},
                                       {kMiB + 1, kMiB + kMiB / 8},
                                       {kMiB + kMiB / 8 + 1, kMiB + kMiB / 4},
                                       {5 * kMiB, 5 * kMiB},
                                       {36 * kMiB + 1, 40 * kMiB}}) {
    pieces.push_back(valueOf(pool.take(wanted)));
    const auto start = reinterpret_cast<CUdeviceptr>(pieces.back().memory.data());
    EXPECT_EQ(driver.memory.at(start).bytes, pinned) << wanted;
  }
}

TEST_F(CudaPinnedTest, ABlockServesARequestThatIsLittleSmaller) {
  const auto first = allocate(16 * 4096);
  cuda->freePinned(first);
  EXPECT_NE(allocate(14 * 4096).data(), first.data());
  const auto second = allocate(15 * 4096 - 7);
  EXPECT_EQ(second.data(), first.data());
  EXPECT_EQ(second.size(), 15u * 4096 - 7);
}

TEST_F(CudaPinnedTest, ABlockWaitsForAllStreamsThatUsedIt) {
  const DeviceStream first = streamOf(0), second = streamOf(1);
  driver.busy = {handle(first), handle(second)};
  const auto block = allocate();
  EXPECT_OK(cuda->copy(first, &block[8], at(kMemory), 8));
  EXPECT_OK(cuda->copy(first, at(kMemory), &block[4095], 1));
  EXPECT_OK(cuda->awaitWord(second, reinterpret_cast<StreamWord*>(block.data()), 1));
  cuda->freePinned(block);
  EXPECT_EQ(driver.recorded.size(), 2u);
  EXPECT_NE(allocate().data(), block.data());
  driver.busy = {handle(second)};
  EXPECT_NE(allocate().data(), block.data());
  driver.busy.clear();
  EXPECT_EQ(allocate().data(), block.data());
  EXPECT_EQ(driver.recorded.size(), 0u);
  EXPECT_EQ(driver.countOf("cuEventCreate"), driver.countOf("cuEventDestroy"));
}

TEST_F(CudaPinnedTest, EveryUseOfABlockIsNoticed) {
  const DeviceStream stream = streamOf(0);
  driver.busy = {handle(stream)};
  const auto use = [&](int kind, std::span<std::byte> block) {
    auto* const word = reinterpret_cast<StreamWord*>(&block[4092]);
    if (kind == 0) return cuda->copy(stream, &block[4095], at(kMemory), 1);
    if (kind == 1) return cuda->copy(stream, at(kMemory), &block[4095], 1);
    if (kind == 2) return cuda->writeWord(stream, word, 1);
    return cuda->awaitWord(stream, word, 1);
  };
  for (int kind = 0; kind < 4; ++kind) {
    const auto block = allocate();
    EXPECT_OK(use(kind, block));
    cuda->freePinned(block);
    EXPECT_EQ(driver.recorded.size(), size_t(kind) + 1);
  }
}

TEST_F(CudaPinnedTest, WorkAfterTheEndOfABlockIsNotWaitedFor) {
  const DeviceStream stream = streamOf(0);
  const auto block = allocate();
  EXPECT_OK(cuda->copy(stream, block.data(), at(kMemory), 8));
  cuda->freePinned(block);
  driver.busy = {handle(stream)};
  EXPECT_EQ(driver.countOf("cuEventRecord"), 1);
  EXPECT_EQ(allocate().data(), block.data());
}

TEST_F(CudaPinnedTest, ADestroyedStreamsWorkIsWaitedFor) {
  const DeviceStream stream = valueOf(cuda->createStream(0));
  driver.busy = {handle(stream)};
  const auto block = allocate();
  EXPECT_OK(cuda->copy(stream, block.data(), at(kMemory), 8));
  driver.take();
  cuda->destroyStream(stream);
  EXPECT_EQ(driver.countOf("cuEventRecord"), 1);
  cuda->freePinned(block);
  EXPECT_EQ(driver.countOf("cuEventRecord"), 1);  // the handle is not touched any more
  EXPECT_NE(allocate().data(), block.data());
  driver.busy.clear();
  EXPECT_EQ(allocate().data(), block.data());
}

TEST_F(CudaPinnedTest, ABlockOfAGraphIsNeverGivenOutAgain) {
  const DeviceStream stream = streamOf(0);
  driver.capturing = {handle(stream)};
  const auto block = allocate();
  EXPECT_OK(cuda->copy(stream, block.data(), at(kMemory), 8));
  driver.capturing.clear();
  cuda->freePinned(block);
  EXPECT_NE(allocate().data(), block.data());
}

TEST_F(CudaPinnedTest, ACaptureIsNotSpoiledByABlockThatWasUsedBefore) {
  const DeviceStream stream = streamOf(0);
  const auto block = allocate();
  EXPECT_OK(cuda->copy(stream, block.data(), at(kMemory), 8));
  driver.capturing = {handle(stream)};
  cuda->freePinned(block);
  EXPECT_NE(allocate().data(), block.data());
  EXPECT_EQ(driver.countOf("cuEventRecord"), 0);
  driver.capturing.clear();
  EXPECT_EQ(allocate().data(), block.data());
  EXPECT_EQ(driver.countOf("cuEventRecord"), 1);
}

TEST_F(CudaPinnedTest, ABlockWhoseStreamFailsIsNotGivenOutAgain) {
  const auto block = allocate();
  EXPECT_OK(cuda->copy(streamOf(0), block.data(), at(kMemory), 8));
  driver.results["cuEventRecord"] = CUDA_ERROR_INVALID_HANDLE;
  cuda->freePinned(block);
  driver.results.clear();
  driver.take();
  EXPECT_NE(allocate().data(), block.data());
  EXPECT_EQ(driver.countOf("cuEventRecord"), 0);
  EXPECT_TRUE(driver.recorded.empty());
}

TEST_F(CudaPinnedTest, ABlockIsFreedOnce) {
  const auto block = allocate();
  cuda->freePinned(block);
  cuda->freePinned(block);                 // is logged
  cuda->freePinned(block.subspan(64, 8));  // is no allocation
  EXPECT_EQ(allocate().data(), block.data());
  EXPECT_NE(allocate().data(), block.data());
}

TEST_F(CudaPinnedTest, NoMemoryIsAnError) {
  driver.results["cuMemHostAlloc"] = CUDA_ERROR_OUT_OF_MEMORY;
  EXPECT_EQ(cuda->allocatePinned(64).status().code(), ErrorCode::kExhausted);
  EXPECT_EQ(cuda->allocatePinned(0).status().code(), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace mooncake::testing
#endif
