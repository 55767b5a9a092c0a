#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/bytes.h"
#include "base/deadline.h"
#include "base/mutex.h"
#include "wires/packets/packet.h"

namespace mooncake {

// The end of a channel that takes the packets for one incarnation.
class PacketSink {
 public:
  virtual ~PacketSink() = default;
  // Takes a packet that has come over this rail. On a polling thread, without a lock. The bytes
  // live until it returns.
  virtual void onPacket(size_t rail, const Packet& packet, ByteView data) = 0;
  // Called about every millisecond after Rails::activate(), on a polling thread. Returns false if
  // nothing is due any more.
  virtual bool tick(Clock::time_point now) = 0;
  // Called when the card of this rail was opened anew: it has another address and knows no peer. On
  // a polling thread, without a lock.
  virtual void onRenewed(size_t rail) = 0;
};

// The sinks of an engine, by the incarnation that their packets bear. Any thread.
class PacketSinks {
 public:
  void add(uint64_t incarnation, std::weak_ptr<PacketSink> sink);
  void remove(uint64_t incarnation);
  std::vector<std::shared_ptr<PacketSink>> all() const;
  // Gives a received packet to the sink of its incarnation. A packet that does not decode, or that
  // no sink waits for, is dropped.
  void deliver(size_t rail, ByteView received);
  // Number of dropped packets.
  uint64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }

 private:
  mutable SharedMutex mutex_;
  std::unordered_map<uint64_t, std::weak_ptr<PacketSink>> sinks_ GUARDED_BY(mutex_);
  std::atomic<uint64_t> dropped_{0};
};

}  // namespace mooncake
