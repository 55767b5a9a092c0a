#include "wires/packets/packet_source.h"

#include <algorithm>
#include <cstring>

namespace mooncake {

size_t PacketSource::fill(std::span<std::byte> out, const Label& label, RegionTable& regions,
                          bool& isLast) {
  Packet next = packet;
  next.incarnation = label.incarnation;
  next.serial = label.serial;
  next.acked = label.acked;
  ++pieces;
  const uint64_t piece =
      hasData() && next.status == Packet::Status::kOk
          ? std::min<uint64_t>(next.length - next.position, out.size() - Packet::kBytes)
          : 0;
  RegionTable::Use use;
  const std::byte* from = nullptr;
  if (next.kind == Packet::Kind::kAnswer && next.status == Packet::Status::kOk) {
    use = regions.open(fromKey, fromOffset, next.length, kRemoteRead);
    from = use ? use.data() + next.position : nullptr;
    if (!use) next.status = Packet::Status::kRefused;
  } else if (piece > 0) {
    from = data.empty() ? owned.data() + (next.position - ownedFrom) : data.data() + next.position;
  }
  if (next.kind == Packet::Kind::kAnswer && next.status != Packet::Status::kOk) {
    next.length = next.position = 0;
    isLast = true;
    next.encode(out.first<Packet::kBytes>());
    return Packet::kBytes;
  }
  next.encode(out.first<Packet::kBytes>());
  if (piece > 0) std::memcpy(out.data() + Packet::kBytes, from, piece);
  packet.position += piece;
  isLast = !hasData() || next.status != Packet::Status::kOk || packet.position == next.length;
  return Packet::kBytes + piece;
}

}  // namespace mooncake
