#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/fork.h"
#include "device/fake/fake_capture.h"
#include "device/fake/fake_devices.h"
#include "device/fake/fake_failures.h"
#include "device/fake/fake_memory.h"
#include "device/fake/fake_stream.h"

namespace mooncake {

class FakeAccelerator final : public FakeDevices {
 public:
  FakeAccelerator();
  ~FakeAccelerator() override;
  FakeAccelerator(const FakeAccelerator&) = delete;
  FakeAccelerator& operator=(const FakeAccelerator&) = delete;

  const char* name() const override { return "fake"; }
  int deviceCount() const override { return FakeMemory::kDevices; }
  Result<MemoryPlace> placeOf(const void* address) override;
  Result<std::span<std::byte>> allocatePinned(size_t bytes) override;
  void freePinned(std::span<std::byte> memory) override;
  Result<DeviceStream> createStream(int device) override;
  void destroyStream(DeviceStream stream) override;
  Status synchronize(DeviceStream stream) override;
  Result<std::unique_ptr<DeviceEvent>> createEvent(int device) override;
  Status copy(DeviceStream stream, void* to, const void* from, size_t bytes) override;
  bool hasStreamWords(int device) const override;
  Status writeWord(DeviceStream stream, StreamWord* word, uint32_t value) override;
  Status awaitWord(DeviceStream stream, StreamWord* word, uint32_t value) override;
  Result<bool> isCapturing(DeviceStream stream) override;
  Result<ExportedMemory> exportMemory(const void* address) override;
  Result<void*> importMemory(const ExportedMemory& memory, int device) override;
  Status closeMemory(void* address) override;

  Status enqueue(DeviceStream stream, std::function<void()> task) override;
  DeviceStream defaultStream(int device) override;
  std::vector<DeviceStream> streams(int device) override;
  bool isIdle(DeviceStream stream) override;
  Result<std::span<std::byte>> allocate(int device, size_t bytes) override;
  void free(std::span<std::byte> memory) override;
  Status inject(FakeFailure failure) override;
  void loseContext() override;
  void limitMemory(size_t bytes) override;
  Status beginCapture(DeviceStream stream) override;
  Result<uint64_t> endCapture(DeviceStream stream) override;
  Status replay(uint64_t graph, DeviceStream stream) override;

  // Drops work that has not begun, and has later calls fail for this reason. Waits for the work that
  // runs, until the deadline.
  void end(const std::string& reason, Deadline deadline);

 private:
  class Event;
  struct Lane {
    std::shared_ptr<FakeStream> stream;
    std::shared_ptr<FakeCapture> capture;  // null: none is on
  };
  using Graph = std::vector<FakeStream::Task>;

  bool isForked() const { return forkGeneration_ != forkGeneration(); }
  // Every function that can fail begins with this.
  Status enter(const char* call);
  // Under the lock. `call` is for the error's text.
  Result<Lane*> find(const char* call, DeviceStream stream);
  Status checkDevice(const char* call, int device) const;
  // Under the lock: records the task or enqueues it.
  Status add(Lane& lane, FakeStream::Task&& task);
  // Under the lock.
  bool isOn(const std::shared_ptr<FakeCapture>& capture) const;
  // Under the lock: takes all streams out of the capture. Returns its tasks, which the caller drops
  // without the lock.
  std::vector<FakeStream::Task> finish(const std::shared_ptr<FakeCapture>& capture);
  Status enqueueWord(const char* call, DeviceStream stream, StreamWord* word,
                     FakeStream::Task&& task);
  // Unmaps the memory once the work that streams hold now is over.
  void retire(const char* call, const void* start, FakeMemory::Origin origin);
  void halt(const std::string& reason);

  const uint32_t forkGeneration_ = forkGeneration();
  FakeMemory memory_;
  FakeFailures failures_;

  std::mutex mutex_;   // guards the fields below
  std::string ended_;  // the reason why calls fail; empty: none
  std::map<std::pair<int, void*>, Lane> lanes_;
  std::list<std::shared_ptr<FakeStream>> closing_;  // destroyed, and their work still runs
  uintptr_t lastStream_ = 0;
  std::vector<std::shared_ptr<const Graph>> graphs_;
};

}  // namespace mooncake
