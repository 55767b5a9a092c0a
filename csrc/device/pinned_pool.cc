#include "device/pinned_pool.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace mooncake {
namespace {

constexpr size_t kSmallest = 4096;
constexpr size_t kSteps = 8;  // sizes between two powers of two

bool hasPassed(const PinnedPool::Piece& piece) {
  if (!piece.event) return true;
  const auto happened = piece.event->hasHappened();
  return happened.ok() && *happened;
}

}  // namespace

PinnedPool::~PinnedPool() {
  for (Piece& piece : idle_) free(piece);
}

size_t PinnedPool::roundedUp(size_t bytes) {
  if (bytes <= kSmallest) return kSmallest;
  const size_t step = std::max(std::bit_floor(bytes - 1) / kSteps, size_t{1});
  return (bytes + step - 1) / step * step;
}

Result<PinnedPool::Piece> PinnedPool::take(size_t bytes) {
  const size_t size = roundedUp(bytes);
  {
    Lock lock(mutex_);
    const auto [first, last] = bySize_.equal_range(size);
    const auto ready =
        std::find_if(first, last, [](const auto& known) { return hasPassed(*known.second); });
    if (ready != last) {
      Piece piece = std::move(*ready->second);
      idle_.erase(ready->second);
      bySize_.erase(ready);
      idleBytes_ -= size;
      return piece;
    }
  }
  auto memory = accelerator_.allocatePinned(size);
  if (!memory.ok()) return memory.error();
  return Piece{.memory = *memory, .event = nullptr};
}

void PinnedPool::giveBack(Piece piece, DeviceStream stream) {
  if (!piece.event) {
    auto event = accelerator_.createEvent(device_);
    if (event.ok()) piece.event = std::move(*event);
  }
  // Without a mark, nobody can tell when the stream has passed.
  if (!piece.event || !piece.event->record(stream).ok()) {
    free(piece);
    return;
  }
  Lock lock(mutex_);
  idleBytes_ += piece.memory.size();
  const size_t size = piece.memory.size();
  idle_.push_back(std::move(piece));
  bySize_.emplace(size, std::prev(idle_.end()));
  while (idleBytes_ > idleLimit_ && hasPassed(idle_.front())) {
    const auto oldest = idle_.begin();
    const auto [first, last] = bySize_.equal_range(oldest->memory.size());
    bySize_.erase(
        std::find_if(first, last, [&](const auto& known) { return known.second == oldest; }));
    idleBytes_ -= oldest->memory.size();
    free(*oldest);
    idle_.erase(oldest);
  }
}

size_t PinnedPool::idleBytes() const {
  Lock lock(mutex_);
  return idleBytes_;
}

void PinnedPool::free(Piece& piece) { accelerator_.freePinned(piece.memory); }

}  // namespace mooncake
