#include "transfer/segment_description.h"

namespace mooncake::transfer {
namespace {

constexpr uint8_t kVersion = 1;
constexpr size_t kMostEndpointBytes = size_t(64) << 10;
constexpr size_t kLeastBufferBytes = 3 * sizeof(uint64_t) + 2 * sizeof(uint32_t);

Status checkVersion(uint8_t version) {
  if (version == kVersion) return {};
  return {ErrorCode::kRefused, "the peer speaks version " + std::to_string(version) +
                                   " of the session protocol, we speak " +
                                   std::to_string(kVersion)};
}

Bytes getOwned(ByteReader& in, size_t most) {
  const ByteView view = in.getBytes(most);
  return {view.begin(), view.end()};
}

}  // namespace

Bytes Question::encode() const {
  return ByteWriter().put(kVersion).put(static_cast<uint8_t>(kind)).take();
}

Result<Question> Question::decode(ByteView message) {
  ByteReader in(message);
  MOONCAKE_TRY(checkVersion(in.get<uint8_t>()));
  const auto kind = in.get<uint8_t>();
  MOONCAKE_TRY(in.finish("question"));
  if (kind < 1 || kind > 2) return Error{ErrorCode::kProtocol, "question: no such kind"};
  return Question{static_cast<Kind>(kind)};
}

Bytes SegmentDescription::encode() const {
  ByteWriter out;
  out.put(kVersion).putString(name).putString(protocol).putBytes(endpoint);
  out.put(static_cast<uint32_t>(buffers.size()));
  for (const RemoteBuffer& buffer : buffers) {
    out.put(buffer.region.address).put(buffer.region.bytes).put(buffer.region.key);
    out.put(buffer.rights).putString(buffer.location);
  }
  return out.take();
}

Result<SegmentDescription> SegmentDescription::decode(ByteView message) {
  ByteReader in(message);
  MOONCAKE_TRY(checkVersion(in.get<uint8_t>()));
  SegmentDescription segment;
  segment.name = in.getString(kMostNameBytes);
  segment.protocol = in.getString(kMostLocationBytes);
  segment.endpoint = getOwned(in, kMostEndpointBytes);
  const auto count = in.get<uint32_t>();
  if (count > in.left() / kLeastBufferBytes)
    return Error{ErrorCode::kProtocol, "segment: fewer buffers than it says"};
  segment.buffers.resize(count);
  for (RemoteBuffer& buffer : segment.buffers) {
    buffer.region.address = in.get<uint64_t>();
    buffer.region.bytes = in.get<uint64_t>();
    buffer.region.key = in.get<uint64_t>();
    buffer.rights = in.get<uint32_t>();
    buffer.location = in.getString(kMostLocationBytes);
    if (buffer.region.address + buffer.region.bytes < buffer.region.address)
      return Error{ErrorCode::kProtocol, "segment: a buffer that wraps around"};
  }
  MOONCAKE_TRY(in.finish("segment"));
  return segment;
}

}  // namespace mooncake::transfer
