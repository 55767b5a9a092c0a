#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "engine/memory/region_table.h"
#include "wires/packets/packet.h"
#include "wires/packets/serials.h"

namespace mooncake {

// The puts and writes of a peer, assembled from packets that come in any order. The owner of the
// memory places each packet as it comes, and counts it. When all packets have come, a put is
// stamped and a write is answered. Each packet comes here once, because Serials drops repetitions.
// Not thread-safe.
class Incoming {
 public:
  explicit Incoming(RegionTable& regions) : regions_(regions) {}

  // Returns whether the packet can be taken in now. Only a peer that breaks the rules is refused.
  bool hasRoomFor(const Packet& packet, size_t bytes) const;

  void put(const Packet& piece, ByteView data);
  // Returns how the write has ended, after its last piece.
  std::optional<Packet::Status> write(const Packet& piece, ByteView data);

  // Drops everything that has begun: later packets belong to another connection.
  void clear();

  // Number of pieces that do not fit their first one, or that no peer may send.
  uint64_t bad() const { return bad_; }

 private:
  static constexpr size_t kMostBegun = 65536;
  static constexpr size_t kMostHeldBytes = size_t(64) << 20;
  static constexpr size_t kNodeBytes = 112;  // of `held_`: each piece may wait for another put

  struct Whole {
    Packet first;  // the first to arrive; the other packets must agree with it
    uint64_t arrived = 0;
    std::optional<uint64_t> isCutAt;  // where a write ends that was given up
    bool isDropped = false;           // late, or refused
  };
  struct Held {
    Packet packet;
    Bytes data;
  };

  // Memory that holding a piece takes. An empty one takes some, too.
  static constexpr size_t heldBytesOf(size_t dataBytes) {
    return dataBytes + sizeof(Held) + kNodeBytes;
  }
  // Returns whether all of the put has come, and it has not landed before.
  bool place(const Packet& piece, ByteView data);
  bool copyIn(const Packet& piece, ByteView data);
  // Counts the put as landed, and places the pieces that have waited for it.
  void land(uint64_t put);

  RegionTable& regions_;
  std::map<uint64_t, Whole> puts_;
  std::map<uint64_t, Whole> writes_;
  Serials landed_;                              // numbers of the landed puts
  std::map<uint64_t, std::vector<Held>> held_;  // by the put that must land first
  size_t heldBytes_ = 0;
  uint64_t bad_ = 0;
  bool loggedRefusal_ = false;
};

}  // namespace mooncake
