#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "engine/contract/transfer.h"
#include "engine/memory/region_table.h"
#include "wires/packets/packet.h"

namespace mooncake {

// A put, get, answer or write that is being cut into packets.
struct PacketSource {
  // The values of a packet that its stream knows.
  struct Label {
    uint64_t incarnation = 0;
    uint64_t serial = 0;
    uint64_t acked = 0;
  };

  Packet packet;                         // the next one, without the label
  std::span<const std::byte> data;       // all bytes of a put or a write
  Bytes owned;                           // the copy of a put that waits, from `ownedFrom` on
  uint64_t ownedFrom = 0;                // position in the put
  Completion* completion = nullptr;      // of a write
  uint64_t fromKey = 0, fromOffset = 0;  // of an answer: where its bytes are
  uint64_t firstRail = 0;                // the rail that it begins with
  uint64_t pieces = 0;                   // number of packets that have left
  std::optional<size_t> path;            // of the last one

  bool hasData() const {
    return packet.kind == Packet::Kind::kPut || packet.kind == Packet::Kind::kAnswer ||
           packet.kind == Packet::Kind::kWrite;
  }
  // Writes the next packet to `out`. Returns its length. An answer is read through the table, and
  // becomes a refusal if that does not allow it.
  size_t fill(std::span<std::byte> out, const Label& label, RegionTable& regions, bool& isLast);
};

}  // namespace mooncake
