#include "wires/packets/packet.h"

#include "wires/stream/wire.h"

namespace mooncake {
namespace {

bool isWellFormed(const Packet& packet, uint64_t dataBytes) {
  using Kind = Packet::Kind;
  const bool isOk = packet.status == Packet::Status::kOk;
  const bool noRange = packet.key == 0 && packet.offset == 0 && packet.length == 0;
  const bool noSignal = packet.signal.offset == 0 && packet.signal.stamp == 0 &&
                        packet.after == 0 && packet.signalKey == 0;
  const bool fits =
      packet.position <= packet.length && dataBytes <= packet.length - packet.position;
  const bool isPiece = fits && (dataBytes > 0 || packet.length == 0);
  const bool isNumbered = packet.serial != 0 && packet.number != 0;
  switch (packet.kind) {
    case Kind::kPut:
      return isNumbered && isOk && isPiece && packet.length <= wire::kMaxPutBytes &&
             wire::isSignalOffset(packet.signal.offset) && packet.after < packet.number;
    case Kind::kGet:
      return isNumbered && isOk && noSignal && packet.position == 0 && dataBytes == 0;
    case Kind::kAnswer:
      return isNumbered && noSignal && packet.key == 0 && packet.offset == 0 &&
             (isOk ? isPiece : dataBytes == 0 && packet.length == 0 && packet.position == 0);
    case Kind::kWrite:
      return isNumbered && noSignal &&
             (isOk ? isPiece : fits && dataBytes == 0 && packet.status == Packet::Status::kAborted);
    case Kind::kWritten:
      return isNumbered && noSignal && noRange && packet.position == 0 && dataBytes == 0;
    case Kind::kAck:
      return packet.serial == 0 && packet.number == 0 && isOk && noSignal && noRange &&
             packet.position == 0 && dataBytes % sizeof(uint64_t) == 0;
    case Kind::kProbe:
    case Kind::kProbed:
      return packet.serial == 0 && isOk && noSignal && noRange && packet.position == 0 &&
             dataBytes == 0;
  }
  return false;
}

}  // namespace

void Packet::encode(std::span<std::byte, kBytes> out) const {
  auto put = [&, at = size_t(0)](auto value) mutable {
    std::memcpy(out.data() + at, &value, sizeof(value));
    at += sizeof(value);
  };
  put(kMark), put(kVersion), put(static_cast<uint8_t>(kind)), put(static_cast<uint32_t>(status));
  put(incarnation), put(serial), put(acked), put(number), put(key), put(offset), put(length);
  put(position), put(signal.offset), put(signal.stamp), put(signalKey), put(after);
}

Result<Packet> Packet::decode(ByteReader& in) {
  Packet packet;
  const auto mark = in.get<uint16_t>();
  const auto version = in.get<uint8_t>();
  packet.kind = static_cast<Kind>(in.get<uint8_t>());
  packet.status = static_cast<Status>(in.get<uint32_t>());
  packet.incarnation = in.get<uint64_t>();
  packet.serial = in.get<uint64_t>();
  packet.acked = in.get<uint64_t>();
  packet.number = in.get<uint64_t>();
  packet.key = in.get<uint64_t>();
  packet.offset = in.get<uint64_t>();
  packet.length = in.get<uint64_t>();
  packet.position = in.get<uint64_t>();
  packet.signal.offset = in.get<uint64_t>();
  packet.signal.stamp = in.get<uint64_t>();
  packet.signalKey = in.get<uint64_t>();
  packet.after = in.get<uint64_t>();
  if (in.failed() || mark != kMark || version != kVersion || packet.status > Status::kAborted ||
      !isWellFormed(packet, in.left()))
    return Error{ErrorCode::kProtocol, "a packet does not decode"};
  return packet;
}

}  // namespace mooncake
