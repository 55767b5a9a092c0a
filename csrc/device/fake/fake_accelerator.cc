#include "device/fake/fake_accelerator.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "base/log.h"
#include "device/fake/fake_mark.h"

namespace mooncake {
namespace {

// How long the end of the process waits for a task that runs.
constexpr std::chrono::seconds kPatienceAtExit{1};

Error failed(const char* call, ErrorCode code, const std::string& cause) {
  return {code, std::string("fake ") + call + ": " + cause};
}

Error failed(const char* call, const Error& error) {
  return failed(call, error.code, error.message);
}

}  // namespace

// Each record() makes a new mark, so that a wait keeps to the record before it.
class FakeAccelerator::Event final : public DeviceEvent {
 public:
  Event(FakeAccelerator& devices, int device) : devices_(devices), device_(device) {}

  Status record(DeviceStream stream) override {
    MOONCAKE_TRY(devices_.enter("record"));
    if (stream.device != device_) {
      return failed("record", ErrorCode::kInvalidArgument,
                    "the event is of device " + std::to_string(device_) + ", and the stream of " +
                        std::to_string(stream.device));
    }
    std::lock_guard lock(devices_.mutex_);
    const auto lane = devices_.find("record", stream);
    if (!lane.ok()) return lane.error();
    if (const auto& capture = (*lane)->capture) {
      mark_ = std::make_shared<FakeMark>(capture, capture->placeOf(*(*lane)->stream));
      return {};
    }
    auto mark = std::make_shared<FakeMark>();
    MOONCAKE_TRY((*lane)->stream->enqueue(FakeMark::task(mark)));
    mark_ = std::move(mark);
    return {};
  }

  Status block(DeviceStream stream) override {
    MOONCAKE_TRY(devices_.enter("block"));
    std::lock_guard lock(devices_.mutex_);
    const auto found = devices_.find("block", stream);
    if (!found.ok()) return found.error();
    if (!mark_) return {};
    Lane& lane = **found;
    const auto& recorded = mark_->capture();
    if (!recorded && !lane.capture) {
      return lane.stream->enqueue([mark = mark_](FakeStream& waits) {
        if (!mark->await()) waits.halt();
      });
    }
    if (!recorded) {
      lane.capture->spoil(lane.stream->name() + " was to wait for work outside of the capture");
      return failed("block", ErrorCode::kInvalidArgument,
                    "the event was recorded outside of the capture of " + lane.stream->name());
    }
    if (lane.capture && lane.capture != recorded) {
      lane.capture->spoil(lane.stream->name() + " was to wait for another capture");
      return failed("block", ErrorCode::kInvalidArgument,
                    "the event belongs to another capture than " + lane.stream->name());
    }
    if (!devices_.isOn(recorded)) {
      return failed("block", ErrorCode::kInvalidArgument,
                    "the event was recorded in a capture that is over");
    }
    lane.capture = recorded;
    recorded->join(*lane.stream, mark_->place());
    return {};
  }

  Result<bool> hasHappened() override {
    MOONCAKE_TRY(devices_.enter("hasHappened"));
    std::lock_guard lock(devices_.mutex_);
    if (!mark_) return true;
    if (mark_->capture()) {
      return failed("hasHappened", ErrorCode::kInvalidArgument,
                    "the event was recorded in a capture, whose work does not run");
    }
    return mark_->hasHappened();
  }

 private:
  FakeAccelerator& devices_;
  const int device_;
  std::shared_ptr<FakeMark> mark_;  // of the last record(); null: none yet. Under devices_.mutex_
};

FakeAccelerator::FakeAccelerator() {
  for (int device = 0; device < deviceCount(); ++device) {
    const DeviceStream first = defaultStream(device);
    lanes_[{device, first.handle}].stream = std::make_shared<FakeStream>(first);
  }
}

FakeAccelerator::~FakeAccelerator() { halt("the devices are destroyed"); }

void FakeAccelerator::halt(const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (ended_.empty()) ended_ = reason;
  for (auto& [key, lane] : lanes_) lane.stream->halt();
  for (auto& stream : closing_) stream->halt();
}

void FakeAccelerator::end(const std::string& reason, Deadline deadline) {
  if (isForked()) return;
  halt(reason);
  std::vector<std::shared_ptr<FakeStream>> all;
  {
    std::lock_guard lock(mutex_);
    for (auto& [key, lane] : lanes_) all.push_back(lane.stream);
    all.insert(all.end(), closing_.begin(), closing_.end());
  }
  for (auto& stream : all) stream->join(deadline);
}

Status FakeAccelerator::enter(const char* call) {
  if (isForked()) {
    return failed(call, ErrorCode::kAborted,
                  "the devices belong to the process that this one was forked from. Start the "
                  "process anew (spawn) to use them");
  }
  {
    std::lock_guard lock(mutex_);
    if (!ended_.empty()) return failed(call, ErrorCode::kSystem, ended_);
  }
  return failures_.count(call);
}

Status FakeAccelerator::checkDevice(const char* call, int device) const {
  if (device >= 0 && device < deviceCount()) return {};
  return failed(call, ErrorCode::kInvalidArgument,
                "there is no device " + std::to_string(device) + ", but 0 and 1");
}

Result<FakeAccelerator::Lane*> FakeAccelerator::find(const char* call, DeviceStream stream) {
  const auto found = lanes_.find({stream.device, stream.handle});
  if (found != lanes_.end()) return &found->second;
  return failed(call, ErrorCode::kInvalidArgument,
                "device " + std::to_string(stream.device) + " has no stream " +
                    std::to_string(reinterpret_cast<uintptr_t>(stream.handle)) +
                    "; it may have been destroyed");
}

bool FakeAccelerator::isOn(const std::shared_ptr<FakeCapture>& capture) const {
  return std::ranges::any_of(lanes_,
                             [&](const auto& entry) { return entry.second.capture == capture; });
}

std::vector<FakeStream::Task> FakeAccelerator::finish(const std::shared_ptr<FakeCapture>& capture) {
  for (auto& [key, lane] : lanes_) {
    if (lane.capture == capture) lane.capture = nullptr;
  }
  return capture->takeTasks();
}

Status FakeAccelerator::add(Lane& lane, FakeStream::Task&& task) {
  if (!lane.capture) return lane.stream->enqueue(std::move(task));
  lane.capture->add(*lane.stream, std::move(task));
  return {};
}

Result<MemoryPlace> FakeAccelerator::placeOf(const void* address) {
  MOONCAKE_TRY(enter("placeOf"));
  return memory_.placeOf(address);
}

Result<std::span<std::byte>> FakeAccelerator::allocatePinned(size_t bytes) {
  MOONCAKE_TRY(enter("allocatePinned"));
  auto memory = memory_.allocatePinned(bytes);
  if (!memory.ok()) return failed("allocatePinned", memory.error());
  return memory;
}

void FakeAccelerator::freePinned(std::span<std::byte> memory) {
  retire("freePinned", memory.data(), FakeMemory::Origin::kPinned);
}

Result<std::span<std::byte>> FakeAccelerator::allocate(int device, size_t bytes) {
  MOONCAKE_TRY(enter("allocate"));
  MOONCAKE_TRY(checkDevice("allocate", device));
  auto memory = memory_.allocate(device, bytes);
  if (!memory.ok()) return failed("allocate", memory.error());
  return memory;
}

void FakeAccelerator::free(std::span<std::byte> memory) {
  retire("free", memory.data(), FakeMemory::Origin::kAllocated);
}

void FakeAccelerator::retire(const char* call, const void* start, FakeMemory::Origin origin) {
  if (isForked()) return;
  const std::shared_ptr<void> mapping = memory_.release(start, origin);
  if (!mapping) {
    log(LogLevel::kError, "fake", call, ": there is no such allocation at ", start);
    return;
  }
  std::lock_guard lock(mutex_);
  for (auto& [key, lane] : lanes_) lane.stream->retain(mapping);
  for (auto& stream : closing_) stream->retain(mapping);
}

Result<DeviceStream> FakeAccelerator::createStream(int device) {
  MOONCAKE_TRY(enter("createStream"));
  MOONCAKE_TRY(checkDevice("createStream", device));
  std::lock_guard lock(mutex_);
  std::erase_if(closing_, [](const auto& stream) { return stream->hasEnded(); });
  const DeviceStream made{.device = device, .handle = reinterpret_cast<void*>(++lastStream_)};
  lanes_[{device, made.handle}].stream = std::make_shared<FakeStream>(made);
  return made;
}

void FakeAccelerator::destroyStream(DeviceStream stream) {
  if (isForked()) return;
  Graph dropped;  // goes after the lock
  std::lock_guard lock(mutex_);
  const auto found = lanes_.find({stream.device, stream.handle});
  if (found == lanes_.end() || stream.handle == nullptr) {
    log(LogLevel::kError, "fake", "destroyStream: there is no such stream of device ",
        stream.device, ", or it is the default one");
    return;
  }
  Lane& lane = found->second;
  if (const auto capture = lane.capture) {
    capture->spoil(lane.stream->name() + " was destroyed");
    if (capture->beganOn(*lane.stream)) dropped = finish(capture);
  }
  lane.stream->close();
  closing_.push_back(std::move(lane.stream));
  lanes_.erase(found);
}

Status FakeAccelerator::synchronize(DeviceStream stream) {
  MOONCAKE_TRY(enter("synchronize"));
  std::shared_ptr<FakeStream> waited;
  {
    std::lock_guard lock(mutex_);
    const auto lane = find("synchronize", stream);
    if (!lane.ok()) return lane.error();
    waited = (*lane)->stream;
    if ((*lane)->capture) {
      (*lane)->capture->spoil("the host was to wait for " + waited->name());
      return failed("synchronize", ErrorCode::kInvalidArgument,
                    "a capture is on, so the work of " + waited->name() + " does not run");
    }
  }
  const Status over = waited->synchronize();
  return over.ok() ? over : failed("synchronize", over.error());
}

Result<std::unique_ptr<DeviceEvent>> FakeAccelerator::createEvent(int device) {
  MOONCAKE_TRY(enter("createEvent"));
  MOONCAKE_TRY(checkDevice("createEvent", device));
  return std::unique_ptr<DeviceEvent>(std::make_unique<Event>(*this, device));
}

Status FakeAccelerator::copy(DeviceStream stream, void* to, const void* from, size_t bytes) {
  MOONCAKE_TRY(enter("copy"));
  for (const void* end : {static_cast<const void*>(to), from}) {
    if (const Status fits = memory_.checkRange(end, bytes); !fits.ok())
      return failed("copy", fits.error());
  }
  const bool isPageable = memory_.placeOf(to).kind == MemoryKind::kHost ||
                          memory_.placeOf(from).kind == MemoryKind::kHost;
  std::shared_ptr<FakeStream> waited;
  {
    std::lock_guard lock(mutex_);
    const auto lane = find("copy", stream);
    if (!lane.ok()) return lane.error();
    MOONCAKE_TRY(add(**lane, [=](FakeStream&) {
      if (bytes != 0) std::memcpy(to, from, bytes);
    }));
    if (isPageable && !(*lane)->capture) waited = (*lane)->stream;
  }
  if (!waited) return {};
  const Status over = waited->synchronize();
  return over.ok() ? over : failed("copy", over.error());
}

bool FakeAccelerator::hasStreamWords(int device) const {
  return device >= 0 && device < deviceCount();
}

Status FakeAccelerator::enqueueWord(const char* call, DeviceStream stream, StreamWord* word,
                                    FakeStream::Task&& task) {
  MOONCAKE_TRY(enter(call));
  if (memory_.placeOf(word).kind != MemoryKind::kPinned) {
    return failed(call, ErrorCode::kInvalidArgument,
                  "the word does not lie in memory of allocatePinned()");
  }
  std::lock_guard lock(mutex_);
  const auto lane = find(call, stream);
  if (!lane.ok()) return lane.error();
  return add(**lane, std::move(task));
}

Status FakeAccelerator::writeWord(DeviceStream stream, StreamWord* word, uint32_t value) {
  return enqueueWord("writeWord", stream, word,
                     [=](FakeStream&) { word->store(value, std::memory_order_release); });
}

Status FakeAccelerator::awaitWord(DeviceStream stream, StreamWord* word, uint32_t value) {
  return enqueueWord("awaitWord", stream, word,
                     [=](FakeStream& runs) { runs.awaitWord(word, value); });
}

Result<bool> FakeAccelerator::isCapturing(DeviceStream stream) {
  MOONCAKE_TRY(enter("isCapturing"));
  std::lock_guard lock(mutex_);
  const auto lane = find("isCapturing", stream);
  if (!lane.ok()) return lane.error();
  return (*lane)->capture != nullptr;
}

Result<ExportedMemory> FakeAccelerator::exportMemory(const void* address) {
  MOONCAKE_TRY(enter("exportMemory"));
  auto exported = memory_.exportMemory(address);
  if (!exported.ok()) return failed("exportMemory", exported.error());
  return exported;
}

Result<void*> FakeAccelerator::importMemory(const ExportedMemory& memory, int device) {
  MOONCAKE_TRY(enter("importMemory"));
  MOONCAKE_TRY(checkDevice("importMemory", device));
  auto address = memory_.importMemory(memory, device);
  if (!address.ok()) return failed("importMemory", address.error());
  return address;
}

Status FakeAccelerator::closeMemory(void* address) {
  MOONCAKE_TRY(enter("closeMemory"));
  if (memory_.release(address, FakeMemory::Origin::kImported)) return {};
  return failed("closeMemory", ErrorCode::kInvalidArgument,
                "no open memory is at this address of importMemory()");
}

Status FakeAccelerator::enqueue(DeviceStream stream, std::function<void()> task) {
  MOONCAKE_TRY(enter("enqueue"));
  FakeStream::Task work = [task = std::move(task)](FakeStream&) { task(); };
  std::lock_guard lock(mutex_);
  const auto lane = find("enqueue", stream);
  if (!lane.ok()) return lane.error();
  return add(**lane, std::move(work));
}

DeviceStream FakeAccelerator::defaultStream(int device) {
  return {.device = device, .handle = nullptr};
}

std::vector<DeviceStream> FakeAccelerator::streams(int device) {
  std::vector<DeviceStream> found;
  if (isForked()) return found;
  std::lock_guard lock(mutex_);
  for (const auto& [key, lane] : lanes_) {
    if (key.first == device) found.push_back(lane.stream->id());
  }
  return found;
}

bool FakeAccelerator::isIdle(DeviceStream stream) {
  if (isForked()) return true;
  std::lock_guard lock(mutex_);
  const auto found = lanes_.find({stream.device, stream.handle});
  return found == lanes_.end() || found->second.stream->isIdle();
}

Status FakeAccelerator::inject(FakeFailure failure) { return failures_.add(std::move(failure)); }

void FakeAccelerator::loseContext() {
  if (!isForked()) halt("the context of the device is lost, for good. Start the process anew");
}

void FakeAccelerator::limitMemory(size_t bytes) { memory_.limit(bytes); }

Status FakeAccelerator::beginCapture(DeviceStream stream) {
  MOONCAKE_TRY(enter("beginCapture"));
  std::lock_guard lock(mutex_);
  const auto lane = find("beginCapture", stream);
  if (!lane.ok()) return lane.error();
  const FakeStream& origin = *(*lane)->stream;
  if ((*lane)->capture) {
    return failed("beginCapture", ErrorCode::kInvalidArgument,
                  "a capture of " + origin.name() + " is on");
  }
  (*lane)->capture = std::make_shared<FakeCapture>(origin);
  return {};
}

Result<uint64_t> FakeAccelerator::endCapture(DeviceStream stream) {
  MOONCAKE_TRY(enter("endCapture"));
  Graph tasks;  // if they are dropped, they go after the lock
  std::lock_guard lock(mutex_);
  const auto lane = find("endCapture", stream);
  if (!lane.ok()) return lane.error();
  const auto capture = (*lane)->capture;
  if (!capture || !capture->beganOn(*(*lane)->stream)) {
    return failed("endCapture", ErrorCode::kInvalidArgument,
                  "no capture began on " + (*lane)->stream->name());
  }
  tasks = finish(capture);
  if (const Status valid = capture->check(); !valid.ok())
    return failed("endCapture", valid.error());
  graphs_.push_back(std::make_shared<const Graph>(std::move(tasks)));
  return graphs_.size() - 1;
}

Status FakeAccelerator::replay(uint64_t graph, DeviceStream stream) {
  MOONCAKE_TRY(enter("replay"));
  std::lock_guard lock(mutex_);
  const auto lane = find("replay", stream);
  if (!lane.ok()) return lane.error();
  if (graph >= graphs_.size() || (*lane)->capture) {
    return failed("replay", ErrorCode::kInvalidArgument,
                  "there is no such graph, or the stream captures");
  }
  for (const FakeStream::Task& task : *graphs_[graph])
    MOONCAKE_TRY((*lane)->stream->enqueue(FakeStream::Task(task)));
  return {};
}

FakeDevices& fakeDevices() {
  static FakeAccelerator* const devices = [] {
    static FakeAccelerator* made =
        new FakeAccelerator;  // never destroyed: threads use it to the end
    std::atexit([] { made->end("the process ends", Deadline::after(kPatienceAtExit)); });
    return made;
  }();
  return *devices;
}

std::unique_ptr<FakeDevices> makeFakeDevices() { return std::make_unique<FakeAccelerator>(); }

}  // namespace mooncake
