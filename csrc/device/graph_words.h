#pragma once

#include <cstdint>
#include <optional>

#include "base/mutex.h"
#include "base/result.h"
#include "device/accelerator.h"

namespace mooncake {

// Words in pinned memory by which the replays of one graph and a thread of the host take turns. A
// graph stores constants, so the places at which it waits have numbers, which grow within a replay:
// 0 is its beginning, its operations have 1, 2, 3 and so on. A replay rings at each place and waits
// there for the host. At the beginning, the host takes back the numbers of the replay before it.
//
// Replays may come at any time, so the words are never freed.
class GraphWords {
 public:
  // For a device whose streams know words, also while they are recorded.
  static Result<GraphWords*> make(Accelerator& accelerator);
  GraphWords(const GraphWords&) = delete;
  GraphWords& operator=(const GraphWords&) = delete;

  static constexpr uint32_t kBeginning = 0;

  // Each enqueues on a stream that is recorded. recordRing: a replay tells the host that it has come
  // to the place. recordWait: it waits there for release().
  Status recordRing(DeviceStream recorded, uint32_t place);
  Status recordWait(DeviceStream recorded, uint32_t place);
  // A replay tells the host how many pieces of the operation's input are copied.
  Status recordCopied(DeviceStream recorded, uint32_t pieces);

  // Returns the place at which a replay has rung, once. None: no replay has.
  std::optional<uint32_t> takeRung();
  uint32_t copied() const { return memory_.copied.load(std::memory_order_acquire); }
  // Lets the replay that waits at the place go on.
  void release(uint32_t place);
  // No later replay waits. Thread-safe, beside release().
  void releaseForGood();

 private:
  struct Memory {
    alignas(64) StreamWord rung{0};  // number of the place, and 1; 0: the host has seen it
    StreamWord copied{0};
    alignas(64) StreamWord open{0};  // 1: a replay may begin
    StreamWord passed{0};            // replays wait at no place up to this one
  };

  GraphWords(Accelerator& accelerator, Memory& memory)
      : accelerator_(accelerator), memory_(memory) {}

  Accelerator& accelerator_;
  Memory& memory_;
  Mutex mutex_;  // keeps the words of releaseForGood()
  bool isForGood_ GUARDED_BY(mutex_) = false;
};

}  // namespace mooncake
