#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "wires/packets/fair_shares.h"

namespace mooncake {

// Buffers of one size for packets, in one block of memory. A page costs nothing until it is
// touched, and the buffer that came back last is the next one. Channels share the buffers
// (FairShares). Any thread.
class PacketPool {
 public:
  // Number of buffers that only urgent packets take, when their channel has its share of the
  // other buffers. Urgent packets free buffers. Without the reserve, two ends with full pools would
  // wait for each other's acknowledgements.
  static constexpr size_t kReserve = 32;

  // The buffers that one channel holds. Lives longer than the channel's packets, and shorter than
  // the pool.
  class Share {
   public:
    explicit Share(PacketPool& pool);
    ~Share();
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;

   private:
    friend class PacketPool;
    PacketPool& pool_;
    FairShares::Owner owner_;  // guarded by the pool's lock, as `urgent_` is
    size_t urgent_ = 0;        // buffers of the reserve
  };
  struct Buffer {
    std::byte* at = nullptr;  // null: none is left for this share
    bool isOfReserve = false;
  };

  // `spareBytes` of memory come behind the buffers, for the caller.
  static Result<std::unique_ptr<PacketPool>> create(size_t count, size_t bytes,
                                                    size_t spareBytes = 0);
  ~PacketPool();
  PacketPool(const PacketPool&) = delete;
  PacketPool& operator=(const PacketPool&) = delete;

  size_t count() const { return count_; }
  size_t bufferBytes() const { return bytes_; }
  // Returns the memory of all buffers and the spare bytes.
  std::span<std::byte> memory() const { return {base_, count_ * bytes_ + spareBytes_}; }
  std::byte* spare() const { return base_ + count_ * bytes_; }
  Buffer take(Share& share, bool isUrgent = false) EXCLUDES(mutex_);
  void giveBack(Share& share, Buffer buffer) EXCLUDES(mutex_);
  // Returns the buffer with this index, in a pool without shares.
  std::byte* at(size_t index) const { return base_ + index * bytes_; }

 private:
  PacketPool(std::byte* base, size_t count, size_t bytes, size_t spareBytes);

  std::byte* const base_;
  const size_t count_, bytes_, spareBytes_;
  mutable Mutex mutex_;
  std::vector<uint32_t> free_ GUARDED_BY(mutex_);
  FairShares shares_ GUARDED_BY(mutex_);
  size_t reserve_ GUARDED_BY(mutex_) = kReserve;  // free buffers of the reserve
};

}  // namespace mooncake
