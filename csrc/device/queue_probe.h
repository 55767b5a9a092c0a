#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/deadline.h"
#include "base/result.h"
#include "device/accelerator.h"

namespace mooncake {

// Finds out which streams of a device share a hardware queue. No driver tells that, so the probe
// lets one stream wait for a word and looks which other streams still write theirs. One thread at a
// time.
class QueueProbe {
 public:
  static constexpr size_t kMost = 32;  // streams of one question: the most queues that CUDA has

  // For a device whose streams know words.
  static Result<std::unique_ptr<QueueProbe>> make(Accelerator& accelerator);
  QueueProbe(const QueueProbe&) = delete;
  QueueProbe& operator=(const QueueProbe&) = delete;

  // Returns the index of the stream that is held up while `waiting` waits; none: it holds up none of
  // them. `streams` are idle and in different queues, so there is at most one. kTimeout: `waiting`
  // itself does not move, or the device is too busy to tell. Takes some milliseconds.
  Result<std::optional<size_t>> heldUpBy(DeviceStream waiting,
                                         std::span<const DeviceStream> streams);
  // Returns the index of a stream that runs work now, and prefers the first ones. kTimeout: none does
  // by the deadline. The streams are the same in each call, in any order.
  Result<size_t> findMoving(std::span<const DeviceStream> streams, Deadline deadline);

 private:
  struct Words {
    StreamWord gate{0};
    StreamWord own{0};
    StreamWord marks[kMost]{};
    StreamWord moves[kMost]{};
  };
  // The last mark of findMoving() on a stream. As long as it has not come, no other one is written:
  // a stream that is held up must not fill its queue.
  struct Move {
    StreamWord* word;
    uint32_t number;
  };

  QueueProbe(Accelerator& accelerator, std::span<std::byte> memory);

  // Returns the streams that have moved only after the wait.
  Result<bool> confirms(DeviceStream waiting, DeviceStream heldUp, Clock::duration patience);
  Result<std::vector<size_t>> ask(DeviceStream waiting, std::span<const DeviceStream> streams,
                                  Clock::duration patience);
  Status enqueueMarks(DeviceStream waiting, std::span<const DeviceStream> streams);
  std::vector<size_t> missing(size_t streams) const;
  Result<const Move*> markMove(DeviceStream stream);
  bool isAt(const StreamWord& word) const { return isAt(word, number_); }
  static bool isAt(const StreamWord& word, uint32_t number);
  static bool await(const std::function<bool()>& isReady, Deadline deadline);

  Accelerator& accelerator_;
  Words& words_;         // never freed: a stream that is held up may write to it at any time
  uint32_t number_ = 0;  // of the question
  std::map<void*, Move> moves_;  // by the handle of the stream
};

}  // namespace mooncake
