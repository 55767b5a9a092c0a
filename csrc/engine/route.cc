#include "engine/route.h"

#include <algorithm>

namespace mooncake {

// Endpoint, wire form:  id[16]  u8 count  count x { string name (<= 32), bytes endpoint (<= 4096) }
namespace {

constexpr size_t kMaxName = 32;
constexpr size_t kMaxEndpoint = 4096;

EngineId readId(ByteReader& in) {
  EngineId id{};
  const auto raw = in.getRaw(id.size());
  std::copy(raw.begin(), raw.end(), id.begin());
  return id;
}

}  // namespace

Bytes encodeEndpoint(const EngineId& owner,
                     const std::vector<std::unique_ptr<Transport>>& transports) {
  ByteWriter out;
  out.putRaw(owner).put<uint8_t>(static_cast<uint8_t>(transports.size()));
  for (const auto& transport : transports) {
    out.putString(transport->name()).putBytes(transport->endpoint());
  }
  return out.take();
}

Result<EngineId> endpointOwner(ByteView endpoint) {
  ByteReader in(endpoint);
  const EngineId id = readId(in);
  if (in.failed())
    return Error{ErrorCode::kProtocol, "a peer published an endpoint that does not decode"};
  return id;
}

Result<std::shared_ptr<Channel>> openRoute(
    const std::vector<std::unique_ptr<Transport>>& transports, const EngineId& peer,
    ByteView endpoint, Deadline deadline) {
  ByteReader in(endpoint);
  readId(in);
  std::vector<std::pair<std::string, ByteView>> offered(in.get<uint8_t>());
  for (auto& [name, bytes] : offered) {
    name = in.getString(kMaxName);
    bytes = in.getBytes(kMaxEndpoint);
  }
  MOONCAKE_TRY(in.finish("endpoint"));

  Error last{ErrorCode::kPeerLost, "no transport in common"};
  std::string reasons;
  for (const auto& transport : transports) {
    for (const auto& [name, bytes] : offered) {
      if (name != transport->name()) continue;
      auto channel = transport->connect(peer, bytes, deadline);
      if (channel.ok()) return channel;
      last = channel.error();
      reasons += (reasons.empty() ? "" : "; ") + name + ": " + last.message;
      // Only "this wire does not lead there" tries the next one: a refusal on the wire that does
      // lead there must not turn into another wire.
      if (last.code != ErrorCode::kUnsupported) return last;
    }
  }
  if (reasons.empty()) {
    for (const auto& transport : transports)
      reasons += std::string(reasons.empty() ? "" : ", ") + transport->name();
    reasons =
        "no transport in common (here: " + reasons + "; check MOONCAKE_TRANSPORTS on both sides)";
  }
  return Error{last.code == ErrorCode::kUnsupported ? ErrorCode::kPeerLost : last.code, reasons};
}

}  // namespace mooncake
