#include "wires/cards/control_receiver.h"

#include <utility>

namespace mooncake::control {
namespace {

// Calls `handle` with the message, if it has been decoded.
template <typename Message, typename Handle>
Status give(Result<Message> message, const Handle& handle) {
  if (!message.ok()) return message.error();
  handle(std::move(*message));
  return {};
}

Status givePacket(ByteView bytes, Receiver& to) {
  ByteReader in(bytes);
  const auto packet = Packet::decode(in);
  if (!packet.ok()) return packet.error();
  to.onPacketMessage(*packet, in.getRaw(in.left()));
  return {};
}

}  // namespace

Status receive(Kind kind, ByteView bytes, Receiver& to) {
  switch (kind) {
    case Kind::kMessage:
      to.onMessage(bytes);
      return {};
    case Kind::kBegin:
      to.onMessageBegin(bytes);
      return {};
    case Kind::kEnd:
      to.onMessageEnd(bytes);
      return {};
    case Kind::kHello:
      return give(Hello::decode(bytes), [&](Hello&& hello) { to.onHello(std::move(hello)); });
    case Kind::kFenced:
      return give(Fenced::decode(bytes), [&](const Fenced& fenced) { to.onFenced(fenced); });
    case Kind::kPacket:
      return givePacket(bytes, to);
    case Kind::kAsk:
      return give(decodeNumber(bytes), [&](uint64_t question) { to.onAsk(question); });
    case Kind::kState:
      return give(State::decode(bytes), [&](const State& state) { to.onState(state); });
    case Kind::kResolve:
      return give(decodeNumber(bytes), [&](uint64_t region) { to.onResolve(region); });
    case Kind::kGrant:
      return give(Grant::decode(bytes), [&](Grant&& grant) { to.onGrant(std::move(grant)); });
    case Kind::kChanged:
      return give(decodeNumber(bytes), [&](uint64_t region) { to.onChanged(region); });
    case Kind::kCard:
      return give(Card::decode(bytes), [&](const Card& card) { to.onCard(card); });
    case Kind::kRetire:
      return give(Retire::decode(bytes), [&](const Retire& retire) { to.onRetire(retire); });
    case Kind::kRetired:
      return give(decodeNumber(bytes), [&](uint64_t ticket) { to.onRetired(ticket); });
    case Kind::kFetch:
      return give(Fetch::decode(bytes), [&](const Fetch& fetch) { to.onFetch(fetch); });
    case Kind::kFetched:
      return give(Fetched::decode(bytes), [&](const Fetched& fetched) { to.onFetched(fetched); });
    case Kind::kCarried:
      return {};
  }
  return {ErrorCode::kProtocol, "a control message does not decode"};
}

}  // namespace mooncake::control
