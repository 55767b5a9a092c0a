#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <poll.h>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/bytes.h"
#include "base/crypto.h"
#include "base/deadline.h"
#include "base/env.h"
#include "base/event_loop.h"
#include "base/result.h"
#include "engine/evidence.h"
#include "engine/life_word.h"
#include "engine/memory/arena.h"
#include "engine/memory/region_table.h"
#include "engine/transfer.h"

// The transport contract. A new wire is a new folder beside shm/, tcp/ and inproc/ that implements
// these three classes, and one line in registry.cc.
namespace mooncake {

using EngineId = std::array<std::byte, 16>;  // random, names one engine for its whole life

// One wire to one peer. All calls from any thread. No call waits for the peer.
//
// A connection that breaks may be made again behind the channel, which then loses what had not
// arrived. Both ends are told afterwards (Engine::observe), and whoever put or sent something that
// matters does it once more: stamps only grow, so what has arrived twice did so once.
class Channel {
 public:
  virtual ~Channel() = default;

  virtual const char* transportName() const = 0;
  // The peer's arena where load and store reach it, else empty. Constant for the channel's life;
  // stays mapped, with all that the peer wrote, also after the peer died and after close().
  virtual std::span<std::byte> peerArena() const = 0;
  // What keeps that mapped for whoever uses it longer than the channel.
  virtual std::shared_ptr<const void> sharedPeerArena() const { return nullptr; }
  // The peer's life word where that is mapped. As long as peerArena().
  virtual PeerLife peerLife() const { return {}; }
  // Where the peer's arena is mapped: not 0 from when the peer has fenced us, hence from before it
  // goes on without us. As long as peerArena().
  virtual const std::atomic<uint32_t>* fenceWord() const { return nullptr; }
  // Whether its connection is made again when it breaks, so that the peer may call once more.
  virtual bool isMadeAgain() const { return false; }
  // Bytes received. Unused, like beat(), where a life word is mapped: that tells more.
  virtual uint64_t lifeSigns() const { return 0; }
  // Does ahead of time what the first transfer between these regions of the peer's and memory that
  // lasts here would wait for on the way to the peer. `done` runs
  // once, on any thread, and must not block or call the channel; by the deadline, or the channel's
  // end.
  virtual void warmUp(std::span<const RemoteRegion>, Deadline, std::function<void(Status)> done) {
    done({});
  }
  // Network cards move bytes by themselves between memory that lasts here and memory that lasts
  // there: copying what is large into such memory costs less than to have it cut into packets.
  virtual bool hasCards() const { return false; }
  // Shows the peer that we live, unless something else has since the last call. Waits for no lock.
  virtual void beat() {}
  // Connections beside the first that have carried nothing since the last call may end, and come
  // back at need. On the loop's thread, every so often. Returns how many end.
  virtual size_t restConnections() { return 0; }
  // Connections that stand.
  virtual size_t connections() const { return 1; }
  // The peer's process has ended, its connection may not have: transfers under way end with this
  // error,
  // and nothing is asked of the peer any more.
  virtual void peerExited(const Error&) {}
  // Makes data appear in the peer's memory, and then the signal. There is no order between two
  // puts, but those that have one word to signal land one after the other: a slot may be put again
  // while its last put is under way.
  virtual Status put(const PutRequest& request) = 0;
  // Fetches. The completion ends exactly once per get that returned ok, also when the channel
  // breaks.
  virtual Status get(const GetRequest& request) = 0;
  // Writes, likewise. No order between two of them, or to puts. What it does to a range that is not
  // all inside the region: nothing.
  virtual Status write(const WriteRequest& request) = 0;
  // The same, and the word is stamped when the bytes are there, before the completion ends: a put
  // whose data stays where it stands. Only where hasCards(), elsewhere kUnsupported.
  virtual Status write(const WriteRequest&, const RemoteSignal&) {
    return {ErrorCode::kUnsupported, std::string(transportName()) + " announces no writes"};
  }
  // The same for many, which small ones make cheaper. Not ok: none of them has begun. A transfer
  // that cannot begin when others have ends its completion with why.
  virtual Status get(std::span<const GetRequest> requests) { return beginAll(requests); }
  virtual Status write(std::span<const WriteRequest> requests) { return beginAll(requests); }
  // A message for the peer's onMessage. Those of one channel arrive in the order of the calls. Lost
  // only with the connection: the last ones of a peer that died may be, whatever it had been told.
  // kExhausted when too much waits already for a peer that does not read.
  static constexpr size_t kMaxMessageBytes = size_t(64) << 10;  // and 1 at least
  virtual Status send(ByteView message) = 0;
  // Ends the gets and writes under way that count at this completion with kAborted (those that
  // still are: one may end well at the same time) and returns when none of them touches its target,
  // or its source, any more. What of a write has left by then may still land.
  virtual void cancel(const Completion* completion) = 0;
  // The peer is out, and may not know it. From the return of this on no put or write of it lands
  // here, not even the rest of one that has begun, and none of its gets is served: it is told
  // kAborted. Our own gets and writes over a socket end so, too; what is mapped here stays
  // readable. Messages still pass both ways. Does not wait for the peer: where it stores into
  // memory that it maps, one store that it was in the middle of may still come (of a write up to
  // 1 MiB), so that memory must not be used again: of puts at all, of writes while
  // hasLateWrites().
  virtual void fence() = 0;
  // The first half of fence(): no transfer of the peer begins, and those under way are given up.
  // The caller then calls fence(). When several peers are lost, it calls this for all of them
  // first: their transfers end side by side, within one grace period.
  virtual void beginFence() {}
  // The peer was fenced, or we have hung up on it, while it stored into memory that it maps, and it
  // has not come to the end of that yet. It never does if its process ends there.
  virtual bool hasLateWrites() const { return false; }
  // Before the goodbyes to all peers: what was put, and may not have come yet, goes ahead of them.
  // Who reads ours may tell the others sooner than a put of ours comes by a slower way.
  virtual void flush() {}
  // No transfer starts or goes on after this; those under way end with kAborted, and what is asked
  // later gets that or, where the channel had ended before, why. Idempotent. Says goodbye where the
  // wire can, so that the peer does not take it for a death.
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

// A channel on its way. Belongs to one thread, which may have many under way: what takes the time
// are the answers of the peers, and those come side by side.
class Connecting {
 public:
  virtual ~Connecting() = default;

  // Goes as far as it can without waiting for the peer. The channel once it stands, null before
  // that. Errors are final; kUnsupported: this wire does not lead there, try the next one;
  // kTimeout: the deadline has passed.
  virtual Result<std::shared_ptr<Channel>> advance() = 0;
  // Adds the sockets that it waits for, after advance() gave null.
  virtual void addSockets(std::vector<pollfd>& sockets) const = 0;
};

// What a transport may use of the engine that owns it. Outlives the transport.
struct TransportContext {
  EngineId id;
  Env env;
  Bytes jobKey;  // never empty
  std::shared_ptr<const Crypto> crypto;
  RegionTable& regions;
  Arena& arena;
  uint64_t life;  // offset of the engine's LifeWord in its arena
  EventLoop& loop;
  // Of the connections that carry bulk data. None: they are the first loop's, too.
  std::vector<EventLoop*> dataLoops = {};
  // Whether a peer that has proved itself may begin a channel, or make ours again; asked on the
  // loop's thread, right before it is welcomed. None: it may.
  std::function<bool(const EngineId& peer)> admits = nullptr;
  // One whose channel has ended for good may begin another.
  bool peersReturn = false;
  // How long a peer's kernel may say nothing before a connection counts as broken; 0: somebody else
  // watches.
  std::chrono::milliseconds deadAfter{0};
  // A peer connected to us and proved that it knows the key. On the loop's thread.
  std::function<void(EngineId peer, std::shared_ptr<Channel>)> onAccepted;
  // A peer called send(). On the loop's thread; the bytes are gone when it returns.
  std::function<void(EngineId peer, ByteView message)> onMessage;
  // The channel ended and not by our close(). Once per channel, and again when it has been
  // reconnected; a goodbye may follow a break. On the loop's thread.
  std::function<void(EngineId peer, const Evidence& evidence)> onEnded;
  // A peer has connected again: the channel that we had is reconnected, whether or not we had seen
  // its end. On the loop's thread.
  std::function<void(EngineId peer)> onReconnected;
};

// What network cards have moved by themselves for an engine, in bytes.
struct CardCounters {
  uint64_t read = 0;     // of gets: by our cards, or by the owner's for us
  uint64_t written = 0;  // of writes
  uint64_t retried = 0;  // that did not come so, and were sent once more
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual const char* name() const = 0;
  // What a peer needs to connect, opaque to everyone else.
  virtual Bytes endpoint() const = 0;
  // Begins a channel to the engine `peer` that published `endpoint` for this transport; goes before
  // the transport does. kUnsupported: this wire does not lead there (another host, say).
  virtual Result<std::unique_ptr<Connecting>> connect(const EngineId& peer, ByteView endpoint,
                                                      Deadline deadline) = 0;
  // Whether somebody listens where this endpoint was published. On the loop's thread; `done` runs
  // there once, by the deadline, and not after shutdown(). kUnknown: this wire cannot tell.
  enum class Listener { kAnswers, kRefuses, kNoAnswer, kUnknown };
  virtual void probe(ByteView, Deadline, std::function<void(Listener)> done) {
    done(Listener::kUnknown);
  }
  // Connects again, once, on behalf of a channel that connect() made and whose connection broke
  // (Evidence::kUnreachable). The channel stays the same: it goes on where it is put into next,
  // fenced as it was. What was under way when it broke is lost, and what is asked of it until then
  // is refused (kPeerLost): neither is kept here. On the loop's thread; `done` runs there once, by
  // the deadline, and not after shutdown(). kUnsupported: this wire cannot do that; kAborted: the
  // channel is closed.
  virtual void reconnect(const EngineId&, const std::shared_ptr<Channel>&, ByteView, Deadline,
                         std::function<void(Status)> done) {
    done({ErrorCode::kUnsupported, "this wire does not connect again"});
  }
  virtual CardCounters cardCounters() const { return {}; }
  // Stops listening and closes what it accepted. Handshakes that are under way there may still end
  // on the loop: that stops before the transport goes.
  virtual void shutdown() = 0;
};

}  // namespace mooncake
