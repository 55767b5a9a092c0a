#pragma once

#include <memory>
#include <optional>
#include <span>

#include "base/mutex.h"
#include "base/result.h"
#include "device/accelerator.h"

namespace mooncake {

// Words in pinned memory that a stream of a group and the threads of its operations tell each
// other. Each operation on the stream has a number, from 1 on, and may wrap.
class StreamWords {
 public:
  // For a stream that knows words.
  static Result<std::unique_ptr<StreamWords>> make(Accelerator& accelerator, DeviceStream stream);
  ~StreamWords();
  StreamWords(const StreamWords&) = delete;
  StreamWords& operator=(const StreamWords&) = delete;

  // Returns the number of the next operation on the stream. None: as many operations are under way
  // as there are words.
  std::optional<uint32_t> next();
  // Enqueues, for operation `number`: tell the host that the stream has come here.
  Status tell(uint32_t number);
  // Enqueues a wait for release(number).
  Status await(uint32_t number);
  bool isTold(uint32_t number) const;
  // Lets the stream go on.
  void release(uint32_t number);

 private:
  static constexpr size_t kWords = 512;

  struct Memory {
    alignas(64) StreamWord told{0};
    alignas(64) StreamWord released[kWords];
  };

  StreamWords(Accelerator& accelerator, DeviceStream stream, std::span<std::byte> memory);

  Accelerator& accelerator_;
  const DeviceStream stream_;
  const std::span<std::byte> bytes_;
  Memory& memory_;
  Mutex mutex_;
  uint32_t next_ GUARDED_BY(mutex_) = 1;
};

}  // namespace mooncake
