#include "backend/device/stream_words.h"

#include <new>

namespace mooncake {

Result<std::unique_ptr<StreamWords>> StreamWords::make(Accelerator& accelerator,
                                                       DeviceStream stream) {
  auto memory = accelerator.allocatePinned(sizeof(Memory));
  if (!memory.ok()) return memory.error();
  return std::unique_ptr<StreamWords>(new StreamWords(accelerator, stream, *memory));
}

StreamWords::StreamWords(Accelerator& accelerator, DeviceStream stream, std::span<std::byte> memory)
    : accelerator_(accelerator),
      stream_(stream),
      bytes_(memory),
      memory_(*new (memory.data()) Memory) {
  // As if the operations before the first one were over.
  for (uint32_t i = 0; i < kWords; ++i) memory_.released[i] = i == 0 ? 0 : i - uint32_t(kWords);
}

StreamWords::~StreamWords() { accelerator_.freePinned(bytes_); }

std::optional<uint32_t> StreamWords::next() {
  Lock lock(mutex_);
  // The word's last operation is past its wait once the stream has told a later one.
  if (next_ - memory_.told.load(std::memory_order_acquire) >= kWords) return std::nullopt;
  return next_++;
}

Status StreamWords::tell(uint32_t number) {
  return accelerator_.writeWord(stream_, &memory_.told, number);
}

Status StreamWords::await(uint32_t number) {
  return accelerator_.awaitWord(stream_, &memory_.released[number % kWords], number);
}

bool StreamWords::isTold(uint32_t number) const {
  return int32_t(memory_.told.load(std::memory_order_acquire) - number) >= 0;
}

void StreamWords::release(uint32_t number) {
  memory_.released[number % kWords].store(number, std::memory_order_release);
}

}  // namespace mooncake
