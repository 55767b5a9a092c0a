#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "base/deadline.h"
#include "base/result.h"
#include "device/device_types.h"
#include "device/memory_owner.h"
#include "engine/contract/transfer.h"
#include "engine/memory/region_table.h"

namespace mooncake {

// The device that owns the data of a message, if one does. Only for data of more than a cell. Of a
// send, `offer` tells peers how to map it.
struct MessageDevice {
  MemoryOwner owner;
  ExportedMemory offer;
};

// One send, receive, put, signal or wait for a signal, made by PointToPoint. When finished() is
// true, status() says how it ended.
class Message {
 public:
  // The call that made the message. kAwaitApplied waits until a number of puts and signals of a
  // rank have been applied.
  enum class Kind { kSend, kReceive, kPut, kSignal, kAwaitSignal, kAwaitApplied };

  Kind kind() const { return kind_; }
  const char* operation() const;  // "send", "put", ...
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  const Status& status() const { return status_; }  // once finished
  int peer() const { return peer_; }  // receive from any source: the sender, once finished
  Deadline deadline() const { return deadline_; }
  // True if a finished send, put or signal is at the other side, or can be fetched by it.
  bool wasSent() const { return number_ != 0; }

 private:
  friend class PointToPoint;
  friend struct MessagePair;
  Message(Kind kind, int peer, uint32_t tag, std::span<std::byte> data, Deadline deadline,
          uint64_t offset, std::shared_ptr<const void> owner, MessageDevice device)
      : kind_(kind),
        peer_(peer),
        tag_(tag),
        offset_(offset),
        data_(data),
        deadline_(deadline),
        owner_(std::move(owner)),
        device_(std::move(device)) {}

  bool isSent() const {
    return kind_ == Kind::kSend || kind_ == Kind::kPut || kind_ == Kind::kSignal;
  }

  std::string whatIsMissing() const;  // at the deadline

  int firstSource() const { return peer_ < 0 ? 0 : peer_; }
  int lastSource(int size) const { return peer_ < 0 ? size - 1 : peer_; }

  const Kind kind_;
  int peer_;                         // -1: any source
  const uint32_t tag_;               // one-sided: the window's number at its owner
  const uint64_t offset_;            // put: offset in the window; kAwaitApplied: the number
  const std::span<std::byte> data_;  // not touched once finished
  const Deadline deadline_;
  std::shared_ptr<const void> owner_;  // keeps `data_`; released when the message ends
  const MessageDevice device_;
  MemoryRegion region_;  // large send or put: region for the receiver to fetch
  uint64_t number_ = 0;  // send: 0 while it waits for a cell; large receive: the sender's number
  bool isAcknowledged_ = false;        // large send: the receiver has fetched it
  RemoteRegion source_;                // large receive: region of the message
  std::unique_ptr<Completion> fetch_;  // large receive: the fetch in flight
  // Send: see PointToPoint::HasData; null: the data is there.
  std::function<Result<bool>()> hasData_;
  uint64_t reconnections_ = 0;  // Pair::reconnections when the fetch began
  uint32_t ours_ = 0;           // put, signal: our window that was opened with the target; 0: none
  std::function<void()> onDone_;
  Status status_;
  std::atomic<bool> finished_{false};
};

}  // namespace mooncake
