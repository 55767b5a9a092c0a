#include "device/shared_pool.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "base/log.h"

namespace mooncake {
namespace {

constexpr size_t kUnit = 512;  // of sizes, and so of places: torch's kernels like such addresses

}  // namespace

Result<std::shared_ptr<SharedPool>> SharedPool::make(Accelerator& accelerator, int device,
                                                     size_t bytes) {
  PeerMemory* const memory = accelerator.peerMemory();
  if (!memory) {
    return Error{ErrorCode::kUnsupported,
                 std::string(accelerator.name()) + " has no memory that processes share"};
  }
  MOONCAKE_TRY(memory->checkSharing(device));
  auto made = memory->allocateShared(device, bytes);
  if (!made.ok()) return made.error();
  return std::shared_ptr<SharedPool>(new SharedPool(accelerator, device, std::move(*made)));
}

SharedPool::SharedPool(Accelerator& accelerator, int device, PeerMemory::Allocation allocation)
    : accelerator_(accelerator),
      device_(device),
      memory_(allocation.memory),
      descriptor_(std::move(allocation.descriptor)),
      free_{{0, memory_.size() / kUnit * kUnit}},
      freeBytes_(memory_.size() / kUnit * kUnit) {}

SharedPool::~SharedPool() {
  takeBack();
  Status gone{ErrorCode::kTimeout, "a stream still uses it"};
  if (leaving_.empty()) gone = accelerator_.peerMemory()->unmapShared(memory_);
  if (gone.ok()) return;
  log(LogLevel::kWarning, accelerator_.name(), "device ", device_, " keeps ", memory_.size(),
      " bytes for messages until the process ends: ", gone.error().message);
}

Result<SharedPool::Piece> SharedPool::take(uint64_t user, size_t asked) {
  const size_t bytes = (std::max<size_t>(asked, 1) + kUnit - 1) / kUnit * kUnit;
  Lock lock(mutex_);
  takeBack();
  const auto known = used_.find(user);
  const size_t used = known == used_.end() ? 0 : known->second;
  if (bytes > freeBytes_ || used + bytes > freeBytes_ - bytes) {
    return Error{ErrorCode::kExhausted,
                 std::to_string(asked) + " bytes are more than the share: " + std::to_string(used) +
                     " bytes are in use for the same rank, and " + std::to_string(freeBytes_) +
                     " of " + std::to_string(memory_.size()) + " are free"};
  }
  const auto room =
      std::ranges::find_if(free_, [&](const auto& part) { return part.second >= bytes; });
  if (room == free_.end()) {
    return Error{ErrorCode::kExhausted,
                 "no " + std::to_string(asked) + " bytes in one piece are free"};
  }
  const auto [offset, length] = *room;
  free_.erase(room);
  if (length > bytes) free_.emplace(offset + bytes, length - bytes);
  freeBytes_ -= bytes;
  used_[user] = used + bytes;
  return Piece{.memory = memory_.subspan(offset, bytes), .user = user};
}

void SharedPool::giveBack(const Piece& piece, DeviceStream stream) {
  Lock lock(mutex_);
  std::unique_ptr<DeviceEvent> event;
  if (!events_.empty()) {
    event = std::move(events_.front());
    events_.pop_front();
  } else if (auto made = accelerator_.createEvent(device_); made.ok()) {
    event = std::move(*made);
  }
  // Without a mark, nothing tells when the stream has passed: the piece stays in use.
  if (event && !event->record(stream).ok()) event = nullptr;
  leaving_.push_back({piece, std::move(event)});
}

void SharedPool::takeBack() {
  for (auto it = leaving_.begin(); it != leaving_.end();) {
    const auto happened = it->event ? it->event->hasHappened() : Result<bool>(false);
    if (!happened.ok() || !*happened) {
      ++it;
      continue;
    }
    release(it->piece);
    events_.push_back(std::move(it->event));
    it = leaving_.erase(it);
  }
}

void SharedPool::release(const Piece& piece) {
  size_t offset = size_t(piece.memory.data() - memory_.data());
  size_t bytes = piece.memory.size();
  freeBytes_ += bytes;
  const auto used = used_.find(piece.user);
  used->second -= bytes;
  if (used->second == 0) used_.erase(used);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_.emplace(offset, bytes);
}

}  // namespace mooncake
