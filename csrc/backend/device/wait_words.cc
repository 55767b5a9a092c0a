#include "backend/device/wait_words.h"

#include <algorithm>
#include <new>

namespace mooncake {

Result<std::unique_ptr<WaitWords>> WaitWords::make(Accelerator& accelerator) {
  auto memory = accelerator.allocatePinned(kWords * sizeof(StreamWord));
  if (!memory.ok()) return memory.error();
  return std::unique_ptr<WaitWords>(new WaitWords(accelerator, *memory));
}

WaitWords::WaitWords(Accelerator& accelerator, std::span<std::byte> memory)
    : accelerator_(accelerator), bytes_(memory) {
  auto* const words = new (memory.data()) StreamWord[kWords];
  for (size_t i = 0; i < kWords; ++i) {
    words[i] = 0;
    free_.push_back({&words[i], 0});
  }
}

WaitWords::~WaitWords() { accelerator_.freePinned(bytes_); }

Result<WaitWords::Place> WaitWords::take() {
  Lock lock(mutex_);
  // A rescue may still have to write the number of the place's last owner.
  const auto ready = std::ranges::find_if(free_, [](const Place& place) {
    return place.word->load(std::memory_order_acquire) == place.number;
  });
  if (ready == free_.end()) {
    return {ErrorCode::kExhausted, "streams wait for " + std::to_string(kWords) +
                                       " messages already. Wait for earlier ones on the host"};
  }
  const Place taken{ready->word, ready->number + 1};
  free_.erase(ready);
  return taken;
}

void WaitWords::giveBack(const Place& place) {
  Lock lock(mutex_);
  free_.push_back(place);
}

Status WaitWords::await(DeviceStream stream, const Place& place) {
  return accelerator_.awaitWord(stream, place.word, place.number);
}

void WaitWords::release(const Place& place) {
  place.word->store(place.number, std::memory_order_release);
}

}  // namespace mooncake
