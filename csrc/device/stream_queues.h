#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/mutex.h"
#include "base/result.h"
#include "device/accelerator.h"
#include "device/queue_probe.h"

namespace mooncake {

// What a stream with an owner waits for, and so which hardware queue it may be in.
enum class StreamRole {
  kRecords,  // nothing, because its work is only recorded into graphs
  kFollows,  // events of the program's streams, or kernels that wait for other ranks
  kWaits,    // words of the host
  kStops,    // kernels that it stops. It is in the queue of prompt work, with a stream of its own
};

// The streams of this library on one device, by the hardware queue that they share. A device has few
// queues for all streams of a process (CUDA: CUDA_DEVICE_MAX_CONNECTIONS, 8 by default), and a stream
// that waits holds up every other stream of its queue. If the host writes the word that a stream
// waits for only after work in the same queue, neither ever goes on. So:
//
//   - In the first queue, no stream of this library waits. It is for prompt work, which ends at once.
//   - Every queue but the first two has at most one owner: a stream of this library that waits, or a
//     stream of the program that waits for words.
//   - If no queue is left, streams that follow share the second queue, and no more streams wait for
//     words. With two queues, that is so from the beginning.
//   - With one queue, prompt work may come behind a stream that waits.
//
// Other streams of the program are in any queue. So prompt work asks each time for a stream that
// moves. Streams are never destroyed: torch's allocators remember the streams that used memory.
// Thread-safe.
class StreamQueues {
 public:
  // Tries streams until the queues are known, which takes some milliseconds. If streams know no words
  // or the driver refuses them, no stream waits, and the roles do not count. The accelerator keeps
  // the object.
  static Result<std::unique_ptr<StreamQueues>> make(Accelerator& accelerator, int device);
  StreamQueues(const StreamQueues&) = delete;
  StreamQueues& operator=(const StreamQueues&) = delete;

  // Returns the number of queues, at most QueueProbe::kMost.
  size_t count() const;
  // Whether there are queues enough for streams that wait for words.
  bool hasWaits() const { return count() > kFirstOwned; }
  // Whether no stream of this library holds up prompt work. kUnsupported: there is only one queue.
  Status checkPrompt() const;

  // Returns a stream for one owner, not in the queue of `programs`, a stream of the program, if that
  // is known. kExhausted for kWaits: no queue is left, there are too few, or no stream has words.
  Result<DeviceStream> take(StreamRole role, std::optional<DeviceStream> programs = std::nullopt);
  // Returns one more stream of the queue of a taken stream.
  Result<DeviceStream> takeBeside(DeviceStream taken);
  // Takes a stream back. The next owner has it when its work so far is over.
  void giveBack(DeviceStream stream);

  // Gives a stream of the program the queue that it is in, unless that is one of the first two, has
  // an owner, or is not known. Returns whether the stream owns it: then it may wait for words, and no
  // stream of this library that waits holds it up. The stream must be idle, and not in a capture; else
  // kTimeout. Each time that it returns true ends with release().
  Result<bool> reserve(DeviceStream programs);
  void release(DeviceStream programs);

  // Returns a stream for work that ends at once: one that moves, if there is one. All share it.
  DeviceStream prompt();
  // The same, but kTimeout: every queue is held up until the deadline.
  Result<DeviceStream> findMoving(Deadline deadline);

 private:
  static constexpr size_t kOfPrompt = 0, kShared = 1, kFirstOwned = 2;

  struct Queue {
    DeviceStream first;                // for prompt work; nothing waits on it
    std::vector<DeviceStream> unused;  // more streams of this queue
    std::optional<void*> owner;        // the handle of the stream that waits
    size_t reserves = 0;               // of a stream of the program
  };
  struct Leaving {
    DeviceStream stream;
    std::unique_ptr<DeviceEvent> idle;
  };

  StreamQueues(Accelerator& accelerator, int device, StreamPriority priority)
      : accelerator_(accelerator), device_(device), priority_(priority) {}

  Status findQueues() REQUIRES(mutex_);
  // Returns a stream of no known queue.
  Result<DeviceStream> takeLoose() REQUIRES(mutex_);
  Result<DeviceStream> takeAlone(std::optional<size_t> apartFrom) REQUIRES(mutex_);
  // Makes a stream and finds its queue.
  enum class Grown {
    kKnown,   // it is one more of a known queue
    kNew,     // it begins a queue
    kBeyond,  // it would begin one more than the most queues
    kSilent,  // work of the program holds it up, so its queue is not known
  };
  Result<Grown> grow() REQUIRES(mutex_);
  std::vector<DeviceStream> firstOfAll() const REQUIRES(mutex_);
  // Returns an unused stream of the first queue that fits, and notes that queue for it.
  template <typename Fits>
  Result<DeviceStream> takeUnused(const Fits& fits) REQUIRES(mutex_);
  Status checkQueues() const REQUIRES(mutex_);
  bool isUsed(size_t queue) const REQUIRES(mutex_);
  // Returns the queue of a stream of the program, none if it is not known.
  std::optional<size_t> leaveToProgram(DeviceStream programs) REQUIRES(mutex_);
  void endLeaving() REQUIRES(mutex_);
  void backInQueue(DeviceStream stream) REQUIRES(mutex_);
  // Tells findMoving() the queues, first the ones without owners.
  void showMoving() REQUIRES(mutex_);

  Accelerator& accelerator_;
  const int device_;
  const StreamPriority priority_;
  mutable Mutex mutex_;
  std::unique_ptr<QueueProbe> probe_ GUARDED_BY(mutex_);  // null: without words
  // False: there are more queues than QueueProbe::kMost.
  bool isShared_ GUARDED_BY(mutex_) = true;
  std::vector<Queue> queues_ GUARDED_BY(mutex_);
  std::vector<DeviceStream> loose_ GUARDED_BY(mutex_);  // unused streams of no known queue
  // The known queue of each stream that has an owner, by handle.
  std::map<void*, size_t> taken_ GUARDED_BY(mutex_);
  std::vector<Leaving> leaving_ GUARDED_BY(mutex_);
  // After mutex_, which is held while queues are tried.
  Mutex movingMutex_;
  std::unique_ptr<QueueProbe> mover_ GUARDED_BY(movingMutex_);  // null: without words
  std::vector<DeviceStream> moving_ GUARDED_BY(movingMutex_);   // at least one
  // Number of them without owners, which come first; at least one.
  size_t unowned_ GUARDED_BY(movingMutex_) = 0;
};

}  // namespace mooncake
