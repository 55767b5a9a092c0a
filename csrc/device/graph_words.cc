#include "device/graph_words.h"

#include <new>

namespace mooncake {
namespace {

constexpr uint32_t kAllPlaces = uint32_t(1) << 30;

}  // namespace

Result<GraphWords*> GraphWords::make(Accelerator& accelerator) {
  auto memory = accelerator.allocatePinned(sizeof(Memory));
  if (!memory.ok()) return memory.error();
  return new GraphWords(accelerator, *new (memory->data()) Memory);
}

Status GraphWords::recordRing(DeviceStream recorded, uint32_t place) {
  return accelerator_.writeWord(recorded, &memory_.rung, place + 1);
}

Status GraphWords::recordWait(DeviceStream recorded, uint32_t place) {
  if (place == kBeginning) return accelerator_.awaitWord(recorded, &memory_.open, 1);
  return accelerator_.awaitWord(recorded, &memory_.passed, place);
}

Status GraphWords::recordCopied(DeviceStream recorded, uint32_t pieces) {
  return accelerator_.writeWord(recorded, &memory_.copied, pieces);
}

std::optional<uint32_t> GraphWords::takeRung() {
  const uint32_t rung = memory_.rung.load(std::memory_order_acquire);
  if (rung == 0) return std::nullopt;
  memory_.rung.store(0, std::memory_order_release);
  const uint32_t place = rung - 1;
  // The replay is past its beginning. The next one has to wait there.
  if (place != kBeginning) memory_.open.store(0, std::memory_order_release);
  return place;
}

void GraphWords::release(uint32_t place) {
  Lock lock(mutex_);
  if (isForGood_) return;
  if (place != kBeginning) return memory_.passed.store(place, std::memory_order_release);
  memory_.passed.store(0, std::memory_order_release);
  memory_.open.store(1, std::memory_order_release);
}

void GraphWords::releaseForGood() {
  Lock lock(mutex_);
  isForGood_ = true;
  memory_.passed.store(kAllPlaces, std::memory_order_release);
  memory_.open.store(1, std::memory_order_release);
}

}  // namespace mooncake
