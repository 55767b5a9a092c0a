#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/bytes.h"
#include "engine/contract/transfer.h"
#include "engine/window.h"
#include "group/call.h"
#include "membership/flush.h"
#include "membership/rank_set.h"

// A rank's part of a group's window. Every offset of it is in this file.
//
//   0      not used: puts begin behind it (Window::kUserOffset)
//   64     ended            number of the last operation that this rank has ended
//   72     core             that this rank runs on (base/rank_cores.h)
//   128    own slot 0       of operations with an even number; read by the ranks that map this part
//          own slot 1       of operations with an odd number
//          inbox slots      [rank][2]: where the ranks that do not map us put theirs
//          push words       [rank]: announce what that rank pushes in an operation (ep/layout.h)
//
//   slot:  0  ready, done, result region | 64  begun, call, payload size, input region | 128
//   payload
//
// `begun`, `ready` and `done` are stamps: the operation, and the attempt at it, that has come so
// far. Only the slot's owner writes them. Data is written only while its stamp is lower. A slot is
// used again two operations later, after all ranks have begun the operation in between. That proves
// that all of them have ended this one (docs/membership.md).
namespace mooncake {

struct alignas(64) Slot {
  // Large operations only. `ready`: this rank's share of the result can be fetched. `done`: this
  // rank has all that it needs.
  std::atomic<uint64_t> ready;
  std::atomic<uint64_t> done;
  RemoteRegion result;  // announced by `ready`

  // From here to the end of the payload is one put, announced by `begun`.
  alignas(64) std::atomic<uint64_t> begun;
  Call call;
  uint32_t payloadBytes;
  // 1: each rank that does not map this slot was put a payload of its own. No other rank could
  // supply that payload, so the operation ends with `done` of all ranks, at any size.
  uint32_t isSplit;
  RemoteRegion input;

  alignas(64) std::byte payload[];
};

constexpr size_t kSlotHeaderBytes = 128;
static_assert(offsetof(Slot, result) == 16 && offsetof(Slot, begun) == 64);
static_assert(offsetof(Slot, payload) == kSlotHeaderBytes);

// A stamp, from the highest bit: epoch 12 bits, number 38, round 14. So it grows with every
// attempt, and a late put of an earlier attempt never replaces a later stamp.
constexpr int kStampRoundBits = 14;
constexpr int kStampNumberBits = 38;
constexpr uint64_t makeStamp(uint64_t number, Attempt attempt) {
  return uint64_t(attempt.losses) << (kStampNumberBits + kStampRoundBits) |
         number << kStampRoundBits | attempt.round;
}
constexpr uint64_t stampNumber(uint64_t stamp) {
  return stamp >> kStampRoundBits & ((uint64_t(1) << kStampNumberBits) - 1);
}
// Largest values of a stamp's fields. Beyond them the group ends with an error.
constexpr uint64_t kMostOperations = (uint64_t(1) << kStampNumberBits) - 1;
constexpr uint32_t kMostRounds = (uint32_t(1) << kStampRoundBits) - 1;
constexpr int kMaxRanks = 1024;
static_assert(kMaxRanks <= GroupRanks::kLimit);
static_assert(kMaxRanks <= 1 << (64 - kStampNumberBits - kStampRoundBits), "losses fit a stamp");

// Copy of the slot that a rank published at the beginning of an operation. Another rank puts it
// again for a rank that is behind.
struct SlotCopy {
  uint64_t stamp = 0;
  size_t offset = 0;  // of the slot in the receiver's part
  Bytes data;         // of the slot, from the end of the stamp on
};

// Offsets in a part. The same on every rank of a group.
class PartLayout {
 public:
  PartLayout(int size, size_t payloadBytes, size_t pushBytes)
      : size_(size),
        slotBytes_(roundUp(kSlotHeaderBytes + payloadBytes)),
        pushBytes_(roundUp(pushBytes)) {}

  size_t bytes() const { return pushes(size_) - Window::kUserOffset; }  // of a part's usable bytes

  size_t ended() const { return Window::kUserOffset; }
  size_t core() const { return ended() + sizeof(uint64_t); }
  size_t ownSlot(uint64_t number) const { return slots() + (number & 1) * slotBytes_; }
  size_t inboxSlot(int from, uint64_t number) const {
    return slots() + (2 + 2 * size_t(from) + (number & 1)) * slotBytes_;
  }
  size_t pushes(int from) const {
    return slots() + (2 + 2 * size_t(size_)) * slotBytes_ + size_t(from) * pushBytes_;
  }

 private:
  static constexpr size_t slots() { return 2 * Window::kUserOffset; }
  static size_t roundUp(size_t bytes) { return (bytes + 63) & ~size_t(63); }

  int size_;
  size_t slotBytes_;
  size_t pushBytes_;
};

}  // namespace mooncake
