#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "device/memory_owner.h"
#include "device/stream_queues.h"
#include "engine/contract/transfer.h"
#include "engine/memory/region_table.h"

namespace mooncake {

// Copies between memory of devices and pinned buffers, for one direction of one connection. A device
// has kBuffers buffers here from its first copy on, and they are used again and again. Copies of one
// device end in the order in which they began. No function but the destructor waits for a device that
// works. Not thread-safe: the owner's lock guards it.
class DeviceCopies {
 public:
  static constexpr size_t kBuffers = 4;
  static constexpr size_t kBufferBytes = size_t(256) << 10;

  // A lent buffer, and the copy from or to it.
  class Copy {
   public:
    enum class State { kNone, kUnderWay, kDone, kFailed };
    State state() const { return state_; }
    const Error& failure() const { return failure_; }
    std::byte* buffer() const { return buffer_; }
    size_t bytes() const { return bytes_; }

   private:
    friend class DeviceCopies;
    std::byte* buffer_ = nullptr;
    std::unique_ptr<DeviceEvent> event_;
    MemoryOwner owner_;
    State state_ = State::kNone;
    bool isLent_ = false;
    size_t bytes_ = 0;
    RegionTable::Use use_;  // keeps the device's memory while the copy is under way
    const Completion* completion_ = nullptr;
    uint64_t transfer_ = 0;
    Error failure_;
  };

  DeviceCopies() = default;
  ~DeviceCopies();  // waits for copies under way
  DeviceCopies(const DeviceCopies&) = delete;
  DeviceCopies& operator=(const DeviceCopies&) = delete;

  // Allocates pinned memory for 16 connections and frees it again, so that the accelerator has it at
  // hand. A later allocation may wait for a stream, which may wait for a transfer.
  static void prepare(Accelerator& accelerator);

  // Lends a buffer for copies of this device. Null: all of them are lent, or their copies are still
  // under way. The first call for a device allocates, and fails as Accelerator::allocatePinned().
  Result<Copy*> lend(const MemoryOwner& device);
  // Ends the loan. A copy under way goes on, and its buffer is free when it ends.
  void giveBack(Copy& copy);
  // Returns whether lend() would return a buffer.
  bool hasRoom(const MemoryOwner& device) const;

  // The memory and the transfer of a copy. Either `use` or `completion` keeps the memory valid until
  // the copy has ended; isUnderWay() looks for the completion, or for the transfer's number.
  struct Origin {
    RegionTable::Use use = {};
    const Completion* completion = nullptr;
    uint64_t transfer = 0;
  };
  // Begin a copy into or from the lent buffer. After an error nothing is under way.
  Status toBuffer(Copy& copy, const std::byte* from, size_t bytes, Origin origin);
  Status fromBuffer(Copy& copy, std::byte* to, size_t bytes, Origin origin);

  // Finds the copies that have ended.
  void look();
  bool isUnderWay() const { return underWay_ != 0; }
  uint64_t ended() const { return ended_; }  // number of copies that have ended so far
  bool isUnderWay(const Completion* completion) const;
  bool isUnderWay(uint64_t transfer) const;

  // Frees the buffers. Nothing may be lent or under way.
  void free();

 private:
  struct Device {
    MemoryOwner owner;
    StreamQueues* queues = nullptr;
    DeviceStream stream;  // of all copies under way
    std::span<std::byte> memory;
    std::array<Copy, kBuffers> copies;

    bool isWorking() const;
  };
  Device* find(const MemoryOwner& owner) const;
  static Status open(Device& device);
  static void close(Device& device);
  Status begin(Copy& copy, void* to, const void* from, size_t bytes, Origin origin);
  void end(Copy& copy, const Status& how);
  template <typename Which>
  bool anyUnderWay(Which&& which) const;

  std::vector<std::unique_ptr<Device>> devices_;
  size_t underWay_ = 0;
  uint64_t ended_ = 0;
};

}  // namespace mooncake
