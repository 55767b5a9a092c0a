#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <type_traits>

#include "base/bytes.h"
#include "base/deadline.h"
#include "base/result.h"
#include "engine/contract/life_word.h"
#include "engine/contract/transfer.h"
#include "engine/memory/region_table.h"

namespace mooncake {

// One wire to one peer. Any thread may call it. No call waits for the peer.
//
// If a connection breaks, it may be made again behind the channel, which then loses data that had
// not arrived. Both ends are told afterwards (Engine::observe), and repeat the puts and messages
// that matter. Arriving twice does no harm, because stamps only grow.
class Channel {
 public:
  virtual ~Channel() = default;

  virtual const char* transportName() const = 0;
  // The peer's arena if load and store reach it, else empty. Constant for the channel's life. It
  // stays mapped, with everything that the peer wrote, after the peer's death and after close().
  virtual std::span<std::byte> peerArena() const = 0;
  // Keeps that mapping alive for users that need it longer than the channel.
  virtual std::shared_ptr<const void> sharedPeerArena() const { return nullptr; }
  // The peer's life word if it is mapped. Lives as long as peerArena().
  virtual PeerLife peerLife() const { return {}; }
  // A word in the peer's mapped arena that turns non-zero when the peer fences us, before it goes
  // on without us. Null if the arena is not mapped. Lives as long as peerArena().
  virtual const std::atomic<uint32_t>* fenceWord() const { return nullptr; }
  // Returns whether a broken connection is made again, so that the peer may call once more.
  virtual bool isMadeAgain() const { return false; }
  // Number of bytes received. Neither this nor beat() is used where a life word is mapped, which
  // says more.
  virtual uint64_t lifeSigns() const { return 0; }
  // Does ahead of time the setup that the first transfer would wait for, between these regions of
  // the peer's and long-lived memory here. `done` runs once, on any thread, by the deadline or when
  // the channel ends. It must not block or call the channel.
  virtual void warmUp(std::span<const RemoteRegion>, Deadline, std::function<void(Status)> done) {
    done({});
  }
  // Returns whether network cards move bytes by themselves between long-lived memory here and
  // there. If so, copying large data into such memory is cheaper than sending it in packets.
  virtual bool hasCards() const { return false; }
  // Returns whether both ends map memory of devices that the other registers, where a device can.
  // Constant for the channel's life.
  virtual bool mapsDevices() const { return false; }
  // Shows the peer that we live, unless other traffic has done so since the last call. Waits
  // for no lock.
  virtual void beat() {}
  // Ends connections other than the first that have carried nothing since the last call. They come
  // back when needed. On the loop's thread, periodically. Returns how many end.
  virtual size_t restConnections() { return 0; }
  // Number of open connections.
  virtual size_t connections() const { return 1; }
  // Tells the channel that the peer's process has ended, though its connection may not have:
  // transfers under way end with this error, and nothing is asked of the peer any more.
  virtual void peerExited(const Error&) {}
  // Writes data into the peer's memory, and then the signal. Two puts have no order, except that
  // puts with the same signal word land one after the other: a slot may be put again while its last
  // put is under way.
  virtual Status put(const PutRequest& request) = 0;
  // Fetches. Each get that returned ok ends its completion exactly once, even if the channel
  // breaks.
  virtual Status get(const GetRequest& request) = 0;
  // Writes. Its completion ends as that of a get does. There is no order between two writes, or
  // between writes and puts. If the range is not all inside the region, no byte is written.
  virtual Status write(const WriteRequest& request) = 0;
  // The same, and stamps the word when the bytes are there, before the completion ends. This is a
  // put whose data is not copied. Only where hasCards(), else kUnsupported.
  virtual Status write(const WriteRequest&, const RemoteSignal&) {
    return {ErrorCode::kUnsupported, std::string(transportName()) + " announces no writes"};
  }
  // The same for several requests, which makes small ones cheaper. After an error none of them has
  // begun. If others have begun and one cannot, its completion ends with the reason.
  virtual Status get(std::span<const GetRequest> requests) { return beginAll(requests); }
  virtual Status write(std::span<const WriteRequest> requests) { return beginAll(requests); }
  // Sends a message for the peer's onMessage. The messages of one channel arrive in the order of
  // the calls. They are lost only with the connection: the last ones of a peer that died may be
  // lost, even if send() was ok. kExhausted: too much waits already for a peer that does not read.
  static constexpr size_t kMaxMessageBytes = size_t(64) << 10;  // the least is 1
  virtual Status send(ByteView message) = 0;
  // Ends the gets and writes under way that count at this completion with kAborted. One of them may
  // still end well at the same time. Returns when none of them touches its target or source any
  // more. Bytes of a write that were already sent may still land.
  virtual void cancel(const Completion* completion) = 0;
  // Asks the peer to withdraw the keys that its cards granted for `region`. Afterwards no part of a
  // cancelled write lands there. Returns a number for isRetired().
  virtual uint64_t retire(const RemoteRegion&) { return 0; }
  // Whether the peer has confirmed it. Also true once the channel is closed or was made again, or
  // either end has fenced the other. False while the connection is broken.
  virtual bool isRetired(uint64_t) { return true; }
  // The peer is out, and may not know it. From the return of this on no put or write of it lands
  // here, not even the rest of one that has begun, and none of its gets is served: it is told
  // kAborted. Our own gets and writes over a socket end so, too; what is mapped here stays
  // readable. Messages still pass both ways. Does not wait for the peer: where it stores into
  // memory that it maps, one store that it was in the middle of may still come (of a write up to
  // 1 MiB), so that memory must not be used again: of puts at all, of writes while
  // hasLateWrites().
  virtual void fence() = 0;
  // The first half of fence(): no transfer of the peer begins, and those under way are given up.
  // The caller then calls fence(). If several peers are lost, the caller first calls this for all
  // of them: their transfers then end in parallel, within one grace period.
  virtual void beginFence() {}
  // Returns whether the peer has not finished a store into memory that it maps, which it was in
  // when we fenced it or closed the channel. If its process ends there, this stays true.
  virtual bool hasLateWrites() const { return false; }
  // Called before the goodbyes to all peers, so that puts that may not have arrived go ahead of
  // them. A peer that reads our memory directly may notify other ranks before our put reaches them
  // over a slower wire.
  virtual void flush() {}
  // Stops all transfers: those under way end with kAborted. Later requests get kAborted, too, or
  // the reason if the channel had ended before. Idempotent. Says goodbye where the wire can, so
  // that the peer does not take it for a death.
  virtual void close() = 0;

 protected:
  template <typename Request>
  Status beginAll(std::span<const Request> requests);
};

template <typename Request>
Status Channel::beginAll(std::span<const Request> requests) {
  for (size_t i = 0; i < requests.size(); ++i) {
    Status begun;
    if constexpr (std::is_same_v<Request, GetRequest>) {
      begun = get(requests[i]);
    } else {
      begun = write(requests[i]);
    }
    if (begun.ok()) continue;
    if (i == 0) return begun;
    requests[i].completion->begin();
    requests[i].completion->end(begun.code());
  }
  return {};
}

}  // namespace mooncake
