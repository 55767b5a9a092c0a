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

// The messages that two engines on one host exchange right after the handshake: one each way, both
// sent at once, so neither waits for the other to begin. Each carries the memfd of the sender's
// arena. Wire form in arena_offer.cc.
namespace mooncake {

// Bytes of the wire itself: opaque here, padded with zeros.
using Greeting = std::array<std::byte, 48>;

struct ArenaOffer {
  Fd memfd;
  uint64_t address = 0;  // of the arena in its owner's process, as in RemoteRegion
  uint64_t bytes = 0;
  uint64_t mirror = 0;   // offset of the RegionMirror in the arena
  uint64_t exports = 0;  // of the DeviceExports; 0: there are none
  uint64_t life = 0;     // offset of the LifeWord
  uint64_t fence = 0;    // offset of the receiver's word (FenceWords)
  Greeting greeting{};
};

Status sendOffer(int socket, const Arena& arena, const ArenaOffer& offsets);

// Sent instead of an offer: the sender has no room for another peer that maps its arena.
Status sendNoRoom(int socket);

// Reads an offer, in any number of pieces, and not one byte beyond it.
class OfferReader {
 public:
  // Reads the bytes that have arrived. True: the offer is complete, call take().
  Result<bool> advance(int socket);
  // kUnsupported: the peer has no room for us.
  Result<ArenaOffer> take();

 private:
  Bytes message_;
  Fd memfd_;
};

// Call it on the loop's thread. A peer that is slow or silent is dropped at the deadline. `done`
// runs once on the loop's thread, at once if the offer has arrived, and gets the socket back.
using OfferHandler = std::function<void(Fd socket, Result<ArenaOffer> offer)>;
void receiveOffer(Fd socket, EventLoop& loop, Deadline deadline, OfferHandler done);

}  // namespace mooncake
