#include "engine/transports/sim/sim_packet.h"

#include "engine/stream/wire.h"

namespace mooncake {

Bytes SimPacket::encode(ByteView data) const {
  ByteWriter out;
  out.put(kVersion).put(static_cast<uint8_t>(kind)).put(first).put(last);
  out.put(static_cast<uint32_t>(status)).put(number).put(key).put(offset).put(length);
  out.put(position).put(signal.offset).put(signal.stamp).putRaw(data);
  return out.take();
}

Result<SimPacket> SimPacket::decode(ByteReader& in) {
  SimPacket packet;
  const auto version = in.get<uint8_t>();
  packet.kind = static_cast<Kind>(in.get<uint8_t>());
  packet.first = in.get<bool>();
  packet.last = in.get<bool>();
  packet.status = static_cast<Status>(in.get<uint32_t>());
  packet.number = in.get<uint64_t>();
  packet.key = in.get<uint64_t>();
  packet.offset = in.get<uint64_t>();
  packet.length = in.get<uint64_t>();
  packet.position = in.get<uint64_t>();
  packet.signal.offset = in.get<uint64_t>();
  packet.signal.stamp = in.get<uint64_t>();
  const bool fits =
      packet.position <= packet.length && in.left() <= packet.length - packet.position;
  const bool isWellFormed =
      packet.kind == Kind::kPut       ? fits && wire::isSignalOffset(packet.signal.offset)
      : packet.kind == Kind::kGet     ? in.left() == 0
      : packet.kind == Kind::kAnswer  ? fits && packet.status <= Status::kAborted
      : packet.kind == Kind::kWrite   ? fits
      : packet.kind == Kind::kWritten ? in.left() == 0 && packet.status <= Status::kAborted
                                      : packet.kind == Kind::kMessage;
  if (in.failed() || version != kVersion || !isWellFormed)
    return Error{ErrorCode::kProtocol, "a packet does not decode"};
  return packet;
}

}  // namespace mooncake
