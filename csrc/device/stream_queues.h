#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/result.h"
#include "device/accelerator.h"
#include "device/queue_probe.h"

namespace mooncake {

// What a stream waits for, and so which hardware queue it may be in.
enum class StreamRole {
  kRecords,  // nothing, because its work is only recorded into graphs
  kPrompt,   // nothing, because its work is enqueued when that can run at once
  kFollows,  // events of the program's streams, or kernels that wait for other ranks
  kWaits,    // words of the host
};

// The streams of this library on one device, by the hardware queue that they share. A device has few
// queues for all streams of a process (CUDA: CUDA_DEVICE_MAX_CONNECTIONS, 8 by default), and a stream
// that waits holds up every other stream of its queue. If the host writes the word that a stream
// waits for only after work in the same queue, neither ever goes on. So:
//
//   - In the first queue, no stream of this library waits.
//   - Every other queue has at most one owner: a stream of this library that waits, or a stream of the
//     program that waits for words.
//   - If no queue is left, streams that follow share the second queue, and no more streams wait for
//     words. With two queues, that is so from the beginning.
//   - With one queue, prompt work may come behind a stream that waits.
//
// Other streams of the program are in any queue. Streams are never destroyed: torch's allocators
// remember those that have used their memory. Thread-safe.
class StreamQueues {
 public:
  // Tries streams until the queues are known, which takes some milliseconds. Without words of streams
  // no stream waits, so the roles do not count. The accelerator keeps the object.
  static Result<std::unique_ptr<StreamQueues>> make(Accelerator& accelerator, int device);
  StreamQueues(const StreamQueues&) = delete;
  StreamQueues& operator=(const StreamQueues&) = delete;

  // Returns the number of queues, at most QueueProbe::kMost.
  size_t count() const { return count_; }
  // Whether there are queues enough for streams that wait for words.
  bool hasWaits() const { return count_ > kFirstOwned; }
  // Whether no stream of this library holds up prompt work. kUnsupported: there is only one queue.
  Status checkPrompt() const;

  // Returns a stream for one owner. kExhausted for kWaits: no queue is left, or there are too few.
  Result<DeviceStream> take(StreamRole role);
  // Returns one more stream of the queue of a taken stream.
  Result<DeviceStream> takeBeside(DeviceStream taken);
  // Takes an idle stream back. A stream that is not given back keeps its queue.
  void giveBack(DeviceStream stream);

  // Gives a stream of the program the queue that it is in, unless that is one of the first two or has
  // an owner. Returns whether the stream owns it: then it may wait for words, and no stream of this
  // library that waits holds it up. The stream must be idle, and not in a capture; else kTimeout.
  Result<bool> reserve(DeviceStream programs);
  // Returns a stream that no wait of any stream holds up now, for work that ends at once.
  // kTimeout: there is none by the deadline.
  Result<DeviceStream> findMoving(Deadline deadline);

 private:
  static constexpr size_t kOfPrompt = 0, kShared = 1, kFirstOwned = 2;

  struct Queue {
    DeviceStream first;                // nothing waits on it
    std::vector<DeviceStream> unused;  // more streams of this queue
    std::optional<void*> owner;        // the handle of the stream that waits
  };

  StreamQueues(Accelerator& accelerator, int device, StreamPriority priority,
               std::unique_ptr<QueueProbe> probe)
      : accelerator_(accelerator), device_(device), priority_(priority), probe_(std::move(probe)) {}

  // All under the lock.
  Status findQueues();
  // Returns a stream of no known queue.
  Result<DeviceStream> takeLoose();
  Result<DeviceStream> takeAlone();
  // Makes a stream and finds its queue.
  enum class Grown {
    kKnown,   // it is one more of a known queue
    kNew,     // it begins a queue
    kBeyond,  // it would begin one more than the most queues
    kSilent,  // work of the program holds it up, so its queue is not known
  };
  Result<Grown> grow();
  std::vector<DeviceStream> firstOfAll() const;
  // Returns an unused stream of the first queue that fits, and notes that queue for it.
  template <typename Fits>
  Result<DeviceStream> takeUnused(const Fits& fits);

  Accelerator& accelerator_;
  const int device_;
  const StreamPriority priority_;
  size_t count_ = 0;
  // False: streams know no words, or there are more queues than QueueProbe::kMost.
  bool isShared_ = false;
  std::mutex mutex_;                         // guards the fields below
  const std::unique_ptr<QueueProbe> probe_;  // null: without words
  std::vector<Queue> queues_;
  std::vector<DeviceStream> loose_;  // unused streams of no known queue
  std::map<void*, size_t> taken_;    // the known queue of each stream that has an owner, by handle
};

}  // namespace mooncake
