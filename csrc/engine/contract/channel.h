#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "base/bytes.h"
#include "base/result.h"
#include "engine/contract/fences.h"
#include "engine/contract/life_signs.h"
#include "engine/contract/transfers.h"

namespace mooncake {

// One wire to one peer. Any thread may call it. No call waits for the peer.
//
// If a connection breaks, it may be made again behind the channel, which then loses data that had
// not arrived. Both ends are told afterwards (Engine::observe), and repeat the puts and messages
// that matter. Arriving twice does no harm, because stamps only grow.
class Channel : public Transfers, public LifeSigns, public Fences {
 public:
  virtual const char* transportName() const = 0;
  // The peer's arena if load and store reach it, else empty. Constant for the channel's life. It
  // stays mapped, with everything that the peer wrote, after the peer's death and after close().
  virtual std::span<std::byte> peerArena() const = 0;
  // Keeps that mapping alive for users that need it longer than the channel.
  virtual std::shared_ptr<const void> sharedPeerArena() const { return nullptr; }
  // Sends a message for the peer's onMessage. The messages of one channel arrive in the order of
  // the calls. They are lost only with the connection: the last ones of a peer that died may be
  // lost, even if send() was ok. kExhausted: too much waits already for a peer that does not read.
  static constexpr size_t kMaxMessageBytes = size_t(64) << 10;  // the least is 1
  virtual Status send(ByteView message) = 0;
  // Called before the goodbyes to all peers, so that puts that may not have arrived go ahead of
  // them. A peer that reads our memory directly may notify other ranks before our put reaches them
  // over a slower wire.
  virtual void flush() {}
  // Stops all transfers: transfers under way end with kAborted. Later requests get kAborted, too,
  // or the reason if the channel had ended before. Idempotent. Says goodbye where the wire can, so
  // that the peer does not take it for a death.
  virtual void close() = 0;
  // Closes without a goodbye: the peer counts as lost. If it lives, it hears of a break. After a
  // goodbye it would take this process for one that has left in peace.
  virtual void abandon() { close(); }
};

}  // namespace mooncake
