#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/mutex.h"
#include "base/result.h"
#include "device/accelerator.h"
#include "device/fake/fake_capture.h"
#include "device/fake/fake_mark.h"
#include "device/fake/fake_stream.h"

namespace mooncake {

// The streams of fake devices and the captures that are on. Thread-safe. Drops no task under its
// lock, as the objects of a task may come back here when they go.
class FakeStreams {
 public:
  // Each device has a default stream, whose handle is null. `queues`: the number of its FakeQueues,
  // which its streams have in turn; 0: each stream has one.
  FakeStreams(int devices, size_t queues);
  // halt(), and waits for the work that runs: its objects may still come here.
  ~FakeStreams();
  FakeStreams(const FakeStreams&) = delete;
  FakeStreams& operator=(const FakeStreams&) = delete;

  DeviceStream create(int device);
  // Returns false if there is no such stream, or it is a default one.
  bool destroy(DeviceStream id);
  // The streams of the device that are not destroyed, the default one first.
  std::vector<DeviceStream> list(int device);
  bool isIdle(DeviceStream id);

  // Enqueues the task, or adds it to the capture that is on.
  Status add(DeviceStream id, FakeStream::Task&& task);
  // Adds work to the capture that is on, which each replay asks for. Fails if none is.
  Status addNode(DeviceStream id, FakeCapture::Node node);
  // Waits for the work so far. A capture that is on is spoiled by that.
  Status synchronize(DeviceStream id);
  // The same for all streams of list(). A stream that is destroyed meanwhile is waited for, too.
  Status synchronizeDevice(int device);
  // Marks the point behind the work so far.
  Result<std::shared_ptr<FakeMark>> mark(DeviceStream id);
  // Later work waits for the mark. The stream joins the capture of the mark.
  Status await(DeviceStream id, const std::shared_ptr<FakeMark>& mark);
  // Keeps the object until the work so far of all streams is over.
  void retain(const std::shared_ptr<void>& object);

  // Spoils the captures that are on, and returns whether there are any.
  bool spoilCaptures(const std::string& call);
  Result<bool> isCapturing(DeviceStream id);
  Status beginCapture(DeviceStream id);
  // Returns the number of the graph.
  Result<uint64_t> endCapture(DeviceStream id);
  Status replay(uint64_t graph, DeviceStream id);

  // Drops the work of all streams that has not begun.
  void halt();
  // After halt(): waits for the work that runs.
  void join(Deadline deadline);

 private:
  struct Lane {
    std::shared_ptr<FakeStream> stream;
    std::shared_ptr<FakeCapture> capture;  // null: none is on
  };
  using Graph = std::vector<FakeCapture::Node>;

  std::shared_ptr<FakeQueue> nextQueue(int device) REQUIRES(mutex_);
  Result<Lane*> find(DeviceStream id) REQUIRES(mutex_);
  // Fails, and spoils the capture, if one is on.
  static Status checkWait(const Lane& lane);
  bool isOn(const std::shared_ptr<FakeCapture>& capture) const REQUIRES(mutex_);
  // Takes all streams out of the capture, and returns its nodes.
  Graph finish(const std::shared_ptr<FakeCapture>& capture) REQUIRES(mutex_);

  struct Queues {
    std::vector<std::shared_ptr<FakeQueue>> all;
    size_t next = 0;
  };

  Mutex mutex_;
  std::vector<Queues> queues_ GUARDED_BY(mutex_);  // of each device
  std::map<std::pair<int, void*>, Lane> lanes_ GUARDED_BY(mutex_);
  // Destroyed, and their work still runs.
  std::list<std::shared_ptr<FakeStream>> closing_ GUARDED_BY(mutex_);
  uintptr_t lastStream_ GUARDED_BY(mutex_) = 0;
  std::vector<std::shared_ptr<const Graph>> graphs_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
