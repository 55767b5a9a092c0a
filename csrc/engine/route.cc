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

struct Wire {
  Transport* transport;
  Bytes endpoint;  // the peer's address for this transport
};

// Tries one wire after the other.
class RouteSearch final : public Connecting {
 public:
  RouteSearch(std::vector<Wire> wires, const EngineId& peer, Deadline deadline)
      : wires_(std::move(wires)), peer_(peer), deadline_(deadline) {}

  Result<std::shared_ptr<Channel>> advance() override {
    for (; next_ < wires_.size(); ++next_) {
      auto channel = advanceOn(wires_[next_]);
      if (channel.ok()) return channel;
      call_.reset();
      // Only kUnsupported (this wire does not reach the peer) leads to the next wire. If the right
      // wire refuses, another wire must not take its place.
      if (channel.error().code != ErrorCode::kUnsupported) return channel;
      reasons_ += (reasons_.empty() ? "" : "; ") + std::string(wires_[next_].transport->name()) +
                  ": " + channel.error().message;
    }
    return Error{ErrorCode::kPeerLost, reasons_};
  }

  void addSockets(std::vector<pollfd>& sockets) const override { call_->addSockets(sockets); }

 private:
  Result<std::shared_ptr<Channel>> advanceOn(const Wire& wire) {
    if (!call_) {
      auto call = wire.transport->connect(peer_, wire.endpoint, deadline_);
      if (!call.ok()) return call.error();
      call_ = std::move(*call);
    }
    return call_->advance();
  }

  const std::vector<Wire> wires_;
  const EngineId peer_;
  const Deadline deadline_;
  size_t next_ = 0;
  std::unique_ptr<Connecting> call_;  // over wires_[next_]
  std::string reasons_;               // why the wires before it do not reach the peer
};

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

Bytes endpointFor(const std::string& transport, ByteView endpoint) {
  ByteReader in(endpoint);
  readId(in);
  Bytes found;
  for (int left = in.get<uint8_t>(); left > 0 && !in.failed(); --left) {
    const std::string name = in.getString(kMaxName);
    const ByteView bytes = in.getBytes(kMaxEndpoint);
    if (name == transport) found.assign(bytes.begin(), bytes.end());
  }
  return found;
}

Result<std::unique_ptr<Connecting>> openRoute(
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

  std::vector<Wire> wires;
  std::string here;
  for (const auto& transport : transports) {
    here += std::string(here.empty() ? "" : ", ") + transport->name();
    for (const auto& [name, bytes] : offered) {
      if (name == transport->name())
        wires.push_back({transport.get(), Bytes(bytes.begin(), bytes.end())});
    }
  }
  if (wires.empty()) {
    return Error{ErrorCode::kPeerLost, "no transport in common (here: " + here +
                                           "; check MOONCAKE_TRANSPORTS on both sides)"};
  }
  return std::unique_ptr<Connecting>(new RouteSearch(std::move(wires), peer, deadline));
}

}  // namespace mooncake
