#pragma once

#include <cstdint>

#include "wires/cards/control.h"
#include "wires/packets/packet.h"

namespace mooncake::control {

// The end of a channel that receives control messages: one function for each kind, except for
// CARRIED. On the loop's thread. The bytes live until the function returns.
class Receiver {
 public:
  virtual void onMessage(ByteView message) = 0;
  virtual void onMessageBegin(ByteView part) = 0;
  virtual void onMessageEnd(ByteView part) = 0;
  virtual void onHello(Hello hello) = 0;
  virtual void onFenced(const Fenced& fenced) = 0;
  virtual void onPacketMessage(const Packet& packet, ByteView data) = 0;
  virtual void onAsk(uint64_t question) = 0;
  virtual void onState(const State& state) = 0;
  virtual void onResolve(uint64_t region) = 0;
  virtual void onGrant(Grant grant) = 0;
  virtual void onChanged(uint64_t region) = 0;
  virtual void onCard(const Card& card) = 0;
  virtual void onRetire(const Retire& retire) = 0;
  virtual void onRetired(uint64_t ticket) = 0;
  virtual void onFetch(const Fetch& fetch) = 0;
  virtual void onFetched(const Fetched& fetched) = 0;

 protected:
  ~Receiver() = default;
};

// Decodes one message, without its kind, and gives it to the receiver. kProtocol: it does not
// decode, and the receiver gets nothing.
Status receive(Kind kind, ByteView bytes, Receiver& receiver);

}  // namespace mooncake::control
