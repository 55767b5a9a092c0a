#pragma once

#include <array>
#include <cstdint>
#include <functional>

#include "base/bytes.h"
#include "base/deadline.h"
#include "base/event_loop.h"
#include "base/fd.h"
#include "base/result.h"
#include "engine/memory/arena.h"

// What two engines on one host tell each other right after the handshake: one message each way,
// both sent at once, so nobody waits for the other to begin. The memfd of the arena rides on it.
// Wire form in arena_offer.cc.
namespace mooncake {

// What the wire itself wants to say: opaque here, padded with zeros.
using Greeting = std::array<std::byte, 48>;

struct ArenaOffer {
  Fd memfd;
  uint64_t address =
      0;  // of the arena in its owner's process: RemoteRegion speaks in such addresses
  uint64_t bytes = 0;
  uint64_t mirror = 0;  // where in the arena the RegionMirror lies
  uint64_t life = 0;    // and the LifeWord
  uint64_t fence = 0;   // and the word (FenceWords) of the peer that this goes to
  Greeting greeting{};
};

Status sendOffer(int socket, const Arena& arena, uint64_t mirror, uint64_t life, uint64_t fence,
                 const Greeting& greeting);

// In place of an offer: the sender has no room for another peer that maps its arena.
Status sendNoRoom(int socket);

// Puts an offer together, in however many pieces it comes; reads not one byte more.
class OfferReader {
 public:
  // Takes what is there. True: take() the offer.
  Result<bool> advance(int socket);
  // kUnsupported: the peer has no room for us.
  Result<ArenaOffer> take();

 private:
  Bytes message_;
  Fd memfd_;
};

// For the loop's thread: a peer that is slow or silent is dropped at the deadline. `done` runs once
// on it, at once if the offer is there, and gets the socket back.
using OfferHandler = std::function<void(Fd socket, Result<ArenaOffer> offer)>;
void receiveOffer(Fd socket, EventLoop& loop, Deadline deadline, OfferHandler done);

}  // namespace mooncake
