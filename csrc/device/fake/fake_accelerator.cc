#include "device/fake/fake_accelerator.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "device/fake/fake_env.h"
#include "device/replay_event.h"

namespace mooncake {
namespace {

// How long the end of the process waits for a task that runs.
constexpr std::chrono::seconds kPatienceAtExit{1};

Error failed(const char* call, ErrorCode code, const std::string& cause) {
  return {code, std::string("fake ") + call + ": " + cause};
}

thread_local CaptureMode modeOfThread = CaptureMode::kGlobal;

size_t queuesOfEnvironment() {
  const auto env = FakeEnv::read();
  if (env.ok()) return env->queues;
  log(LogLevel::kError, "device", env.error().message);
  std::abort();
}

// Adds the call to the error's text.
Status named(const char* call, Status status) {
  if (status.ok()) return status;
  return failed(call, status.code(), status.error().message);
}

template <typename T>
Result<T> named(const char* call, Result<T> result) {
  if (!result.ok()) return failed(call, result.error().code, result.error().message);
  return result;
}

}  // namespace

// Each record() makes a new mark, so that a wait keeps to the record before it.
class FakeAccelerator::Event final : public ReplayEvent {
 public:
  Event(FakeAccelerator& devices, int device) : devices_(devices), device_(device) {}

  Status record(DeviceStream stream) override {
    MOONCAKE_TRY(devices_.enter("record"));
    if (stream.device != device_) {
      return failed("record", ErrorCode::kInvalidArgument,
                    "the event is of device " + std::to_string(device_) + ", and the stream of " +
                        std::to_string(stream.device));
    }
    Lock lock(last_->mutex);
    auto made = named("record", devices_.streams_.mark(stream));
    if (!made.ok()) return made.error();
    last_->mark = std::move(*made);
    return {};
  }

  Status block(DeviceStream stream) override {
    MOONCAKE_TRY(devices_.enter("block"));
    Lock lock(last_->mutex);
    return last_->mark ? named("block", devices_.streams_.await(stream, last_->mark)) : Status();
  }

  Result<bool> hasHappened() override {
    MOONCAKE_TRY(devices_.enter("hasHappened"));
    Lock lock(last_->mutex);
    if (!last_->mark) return true;
    if (!last_->mark->capture()) return last_->mark->hasHappened();
    return failed("hasHappened", ErrorCode::kInvalidArgument,
                  "the event was recorded in a capture, whose work does not run");
  }

  Status recordInReplays(DeviceStream stream) override {
    MOONCAKE_TRY(devices_.enter("recordInReplays"));
    return named("recordInReplays", devices_.streams_.addNode(stream, [last = last_] {
      Lock lock(last->mutex);
      last->mark = std::make_shared<FakeMark>();
      return FakeMark::recordTask(last->mark);
    }));
  }

  Status blockInReplays(DeviceStream stream) override {
    MOONCAKE_TRY(devices_.enter("blockInReplays"));
    return named("blockInReplays",
                 devices_.streams_.addNode(stream, [last = last_]() -> FakeStream::Task {
                   Lock lock(last->mutex);
                   if (!last->mark || last->mark->capture()) return [](FakeStream&) {};
                   return FakeMark::waitTask(last->mark);
                 }));
  }

 private:
  // Graphs may outlive the event.
  struct Last {
    Mutex mutex;
    std::shared_ptr<FakeMark> mark GUARDED_BY(mutex);  // of the last record(); null: none yet
  };

  FakeAccelerator& devices_;
  const int device_;
  const std::shared_ptr<Last> last_ = std::make_shared<Last>();
};

void FakeAccelerator::halt(const std::string& reason) {
  {
    Lock lock(mutex_);
    if (ended_.empty()) ended_ = reason;
  }
  streams_.halt();
}

void FakeAccelerator::end(Deadline deadline) {
  if (isForked()) return;
  halt("the process ends");
  streams_.join(deadline);
}

Status FakeAccelerator::enter(const char* call) {
  callers_.note();
  if (isForked()) {
    return failed(call, ErrorCode::kAborted,
                  "the devices belong to the process that this one was forked from. Start the "
                  "process anew (spawn) to use them");
  }
  {
    Lock lock(mutex_);
    if (!ended_.empty()) return failed(call, ErrorCode::kSystem, ended_);
  }
  return failures_.count(call);
}

Status FakeAccelerator::checkDevice(const char* call, int device) const {
  if (device >= 0 && device < deviceCount()) return {};
  return failed(call, ErrorCode::kInvalidArgument,
                "there is no device " + std::to_string(device) + ", but 0 and 1");
}

Result<std::string> FakeAccelerator::describe(int device) {
  MOONCAKE_TRY(enter("describe"));
  if (device < 0) return std::string("fake driver");
  MOONCAKE_TRY(checkDevice("describe", device));
  return std::string("fake device");
}

Result<MemoryPlace> FakeAccelerator::placeOf(const void* address) {
  MOONCAKE_TRY(enter("placeOf"));
  return memory_.placeOf(address);
}

Result<std::span<std::byte>> FakeAccelerator::allocatePinned(size_t bytes) {
  MOONCAKE_TRY(enter("allocatePinned"));
  return named("allocatePinned", memory_.allocatePinned(bytes));
}

void FakeAccelerator::freePinned(std::span<std::byte> memory) {
  retire("freePinned", memory.data(), FakeMemory::Origin::kPinned);
}

Result<std::span<std::byte>> FakeAccelerator::allocate(int device, size_t bytes) {
  MOONCAKE_TRY(enter("allocate"));
  MOONCAKE_TRY(checkDevice("allocate", device));
  return named("allocate", memory_.allocate(device, bytes));
}

void FakeAccelerator::free(std::span<std::byte> memory) {
  retire("free", memory.data(), FakeMemory::Origin::kAllocated);
}

void FakeAccelerator::retire(const char* call, const void* start, FakeMemory::Origin origin) {
  callers_.note();
  if (isForked()) return;
  const std::shared_ptr<void> mapping = memory_.release(start, origin);
  if (mapping) return streams_.retain(mapping);
  log(LogLevel::kError, "device", "fake ", call, ": there is no such allocation at ", start);
}

Result<DeviceStream> FakeAccelerator::createStream(int device, StreamPriority priority) {
  MOONCAKE_TRY(enter("createStream"));
  MOONCAKE_TRY(checkDevice("createStream", device));
  const DeviceStream made = streams_.create(device);
  if (priority == StreamPriority::kHigh) {
    Lock lock(mutex_);
    highStreams_.insert(made.handle);
  }
  return made;
}

StreamPriority FakeAccelerator::priorityOf(DeviceStream stream) {
  Lock lock(mutex_);
  return highStreams_.contains(stream.handle) ? StreamPriority::kHigh : StreamPriority::kNormal;
}

void FakeAccelerator::destroyStream(DeviceStream stream) {
  callers_.note();
  if (isForked() || streams_.destroy(stream)) return;
  log(LogLevel::kError, "device", "fake destroyStream: there is no such stream of device ",
      stream.device, ", or it is the default one");
}

Status FakeAccelerator::synchronize(DeviceStream stream) {
  MOONCAKE_TRY(enter("synchronize"));
  return named("synchronize", streams_.synchronize(stream));
}

Result<std::unique_ptr<DeviceEvent>> FakeAccelerator::createEvent(int device) {
  MOONCAKE_TRY(enter("createEvent"));
  MOONCAKE_TRY(checkDevice("createEvent", device));
  return std::unique_ptr<DeviceEvent>(std::make_unique<Event>(*this, device));
}

Status FakeAccelerator::copy(DeviceStream stream, void* to, const void* from, size_t bytes) {
  MOONCAKE_TRY(enter("copy"));
  MOONCAKE_TRY(named("copy", memory_.checkRange(to, bytes)));
  MOONCAKE_TRY(named("copy", memory_.checkRange(from, bytes)));
  const bool isPageable = memory_.placeOf(to).kind == MemoryKind::kHost ||
                          memory_.placeOf(from).kind == MemoryKind::kHost;
  MOONCAKE_TRY(named("copy", streams_.add(stream, [=](FakeStream&) {
    if (bytes != 0) std::memcpy(to, from, bytes);
  })));
  const auto capturing = streams_.isCapturing(stream);
  if (!isPageable || !capturing.ok() || *capturing) return capturing.status();
  return named("copy", streams_.synchronize(stream));
}

bool FakeAccelerator::hasStreamWords(int device) const {
  return device >= 0 && device < deviceCount();
}

Status FakeAccelerator::addWord(const char* call, DeviceStream stream, StreamWord* word,
                                FakeStream::Task&& task) {
  MOONCAKE_TRY(enter(call));
  if (memory_.placeOf(word).kind == MemoryKind::kPinned)
    return named(call, streams_.add(stream, std::move(task)));
  return failed(call, ErrorCode::kInvalidArgument,
                "the word does not lie in memory of allocatePinned()");
}

Status FakeAccelerator::writeWord(DeviceStream stream, StreamWord* word, uint32_t value) {
  return addWord("writeWord", stream, word,
                 [=](FakeStream&) { word->store(value, std::memory_order_release); });
}

Status FakeAccelerator::awaitWord(DeviceStream stream, StreamWord* word, uint32_t value) {
  return addWord("awaitWord", stream, word,
                 {[=](FakeStream& runs) { runs.awaitWord(word, value); }, /*isWait=*/true});
}

Status FakeAccelerator::checkRecordedWords(int device) {
  MOONCAKE_TRY(enter("checkRecordedWords"));
  return checkDevice("checkRecordedWords", device);
}

CaptureMode FakeAccelerator::exchangeCaptureMode(CaptureMode mode) {
  return std::exchange(modeOfThread, mode);
}

Status FakeAccelerator::enterUnsafe(const std::string& call) {
  if (modeOfThread != CaptureMode::kGlobal || !streams_.spoilCaptures(call)) return {};
  return failed(call.c_str(), ErrorCode::kInvalidArgument,
                "a thread captures a graph, and the mode of this one is global");
}

Result<bool> FakeAccelerator::isCapturing(DeviceStream stream) {
  MOONCAKE_TRY(enter("isCapturing"));
  return named("isCapturing", streams_.isCapturing(stream));
}

Status FakeAccelerator::prepareKernels(int device) {
  MOONCAKE_TRY(enter("prepareKernels"));
  MOONCAKE_TRY(checkDevice("prepareKernels", device));
  return named("prepareKernels", kernels_.prepare(device));
}

Result<KernelRoom> FakeAccelerator::roomFor(const KernelLaunch& launch, int device) {
  MOONCAKE_TRY(enter("roomFor"));
  MOONCAKE_TRY(checkDevice("roomFor", device));
  return named("roomFor", kernels_.roomFor(launch, device));
}

Status FakeAccelerator::launch(DeviceStream stream, const KernelLaunch& launch) {
  MOONCAKE_TRY(enter("launch"));
  auto work = kernels_.bind(stream, launch);
  if (!work.ok()) return named("launch", work.status());
  return named("launch", streams_.add(stream, [this, work = std::move(*work)](FakeStream&) {
    const Status ran = work();
    if (!ran.ok()) halt("the context of the device is lost, for good: " + ran.error().message);
  }));
}

void FakeAccelerator::setKernels(FakeKernels kernels) { kernels_.set(std::move(kernels)); }

Result<ExportedMemory> FakeAccelerator::exportMemory(const void* address) {
  MOONCAKE_TRY(enter("exportMemory"));
  return named("exportMemory", memory_.exportMemory(address));
}

Result<void*> FakeAccelerator::importMemory(const ExportedMemory& memory, int device) {
  MOONCAKE_TRY(enter("importMemory"));
  MOONCAKE_TRY(checkDevice("importMemory", device));
  return named("importMemory", memory_.importMemory(memory, device));
}

Status FakeAccelerator::closeMemory(void* address) {
  MOONCAKE_TRY(enter("closeMemory"));
  if (memory_.release(address, FakeMemory::Origin::kImported)) return {};
  return failed("closeMemory", ErrorCode::kInvalidArgument,
                "no open memory is at this address of importMemory()");
}

Status FakeAccelerator::checkSharing(int device) {
  MOONCAKE_TRY(enter("checkSharing"));
  return checkDevice("checkSharing", device);
}

Result<PeerMemory::Allocation> FakeAccelerator::allocateShared(int device, size_t bytes) {
  MOONCAKE_TRY(enter("allocateShared"));
  MOONCAKE_TRY(checkDevice("allocateShared", device));
  return named("allocateShared", memory_.allocateShared(device, bytes));
}

Result<std::span<std::byte>> FakeAccelerator::mapShared(const Fd& descriptor, size_t bytes,
                                                        int device) {
  MOONCAKE_TRY(enter("mapShared"));
  MOONCAKE_TRY(checkDevice("mapShared", device));
  return named("mapShared", memory_.mapShared(descriptor, bytes, device));
}

// At once, unlike free(): work that still uses the memory faults, as on a GPU.
Status FakeAccelerator::unmapShared(std::span<std::byte> memory) {
  MOONCAKE_TRY(enter("unmapShared"));
  if (memory_.release(memory.data(), FakeMemory::Origin::kShared)) return {};
  return failed("unmapShared", ErrorCode::kInvalidArgument,
                "no shared memory is mapped at this address. It may have been unmapped");
}

// The device's memory is the host's.
Result<std::span<std::byte>> FakeAccelerator::mapForHost(std::span<std::byte> memory) {
  MOONCAKE_TRY(enter("mapForHost"));
  return memory;
}

Result<bool> FakeAccelerator::canAccessPeer(int device, int peer) {
  MOONCAKE_TRY(enter("canAccessPeer"));
  MOONCAKE_TRY(checkDevice("canAccessPeer", device));
  MOONCAKE_TRY(checkDevice("canAccessPeer", peer));
  return true;
}

Status FakeAccelerator::enqueue(DeviceStream stream, std::function<void()> task) {
  MOONCAKE_TRY(enter("enqueue"));
  return named("enqueue", streams_.add(stream, [task = std::move(task)](FakeStream&) { task(); }));
}

DeviceStream FakeAccelerator::defaultStream(int device) {
  return {.device = device, .handle = nullptr};
}

std::vector<DeviceStream> FakeAccelerator::streams(int device) {
  return isForked() ? std::vector<DeviceStream>() : streams_.list(device);
}

Status FakeAccelerator::synchronizeDevice(int device) {
  MOONCAKE_TRY(enter("synchronize"));
  MOONCAKE_TRY(checkDevice("synchronize", device));
  return named("synchronize", streams_.synchronizeDevice(device));
}

bool FakeAccelerator::isIdle(DeviceStream stream) { return isForked() || streams_.isIdle(stream); }

Status FakeAccelerator::inject(FakeFailure failure) { return failures_.add(std::move(failure)); }

void FakeAccelerator::loseContext() {
  if (!isForked()) halt("the context of the device is lost, for good. Start the process anew");
}

void FakeAccelerator::limitMemory(size_t bytes) { memory_.limit(bytes); }

Status FakeAccelerator::beginCapture(DeviceStream stream) {
  MOONCAKE_TRY(enter("beginCapture"));
  return named("beginCapture", streams_.beginCapture(stream));
}

Result<uint64_t> FakeAccelerator::endCapture(DeviceStream stream) {
  MOONCAKE_TRY(enter("endCapture"));
  return named("endCapture", streams_.endCapture(stream));
}

Status FakeAccelerator::replay(uint64_t graph, DeviceStream stream) {
  MOONCAKE_TRY(enter("replay"));
  return named("replay", streams_.replay(graph, stream));
}

FakeDevices& fakeDevices() {
  static FakeAccelerator* const devices = [] {
    // Never destroyed: threads use it.
    static FakeAccelerator* const made = new FakeAccelerator(queuesOfEnvironment());
    std::atexit([] { made->end(Deadline::after(kPatienceAtExit)); });
    return made;
  }();
  return *devices;
}

std::unique_ptr<FakeDevices> makeFakeDevices(size_t queues) {
  return std::make_unique<FakeAccelerator>(queues);
}

}  // namespace mooncake
