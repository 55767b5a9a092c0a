#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>

#include "base/mutex.h"
#include "base/result.h"
#include "device/accelerator.h"

namespace mooncake {

// Words in pinned memory at which streams of the program wait for one event each, in any order.
// Thread-safe.
class WaitWords {
 public:
  static Result<std::unique_ptr<WaitWords>> make(Accelerator& accelerator);
  ~WaitWords();
  WaitWords(const WaitWords&) = delete;
  WaitWords& operator=(const WaitWords&) = delete;

  // A word, and the number that it has once the event has come.
  struct Place {
    StreamWord* word;
    uint32_t number;
  };

  // Returns a place of the caller's own, until it gives it back. kExhausted: all are in use.
  Result<Place> take();
  // The place serves again once its number is there.
  void giveBack(const Place& place);
  // Enqueues a wait for release().
  Status await(DeviceStream stream, const Place& place);
  // The event has come: lets the streams go on.
  static void release(const Place& place);

 private:
  static constexpr size_t kWords = 1024;

  WaitWords(Accelerator& accelerator, std::span<std::byte> memory);

  Accelerator& accelerator_;
  const std::span<std::byte> bytes_;
  Mutex mutex_;
  std::deque<Place> free_ GUARDED_BY(mutex_);  // given back last: at the back
};

}  // namespace mooncake
