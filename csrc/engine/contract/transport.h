#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <poll.h>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/crypto.h"
#include "base/deadline.h"
#include "base/event_loop.h"
#include "base/result.h"
#include "engine/contract/channel.h"
#include "engine/contract/engine_id.h"
#include "engine/contract/evidence.h"
#include "engine/env.h"
#include "engine/memory/arena.h"
#include "engine/memory/region_table.h"

// The transport contract. A new wire is a new folder in wires/ that implements Channel,
// Connecting and Transport, and one line in wires/registry.cc.
namespace mooncake {

// A channel that is being opened. Belongs to one thread, which may have many under way: the time
// goes into the answers of the peers, which come in parallel.
class Connecting {
 public:
  virtual ~Connecting() = default;

  // Goes as far as it can without waiting for the peer. Returns the channel once it is open, null
  // before that. Errors are final. kUnsupported: this wire does not reach the peer, try the next
  // one. kTimeout: the deadline has passed.
  virtual Result<std::shared_ptr<Channel>> advance() = 0;
  // Adds the sockets that it waits for, after advance() returned null.
  virtual void addSockets(std::vector<pollfd>& sockets) const = 0;
};

// The parts of its engine that a transport may use. Outlives the transport.
struct TransportContext {
  EngineId id;
  EngineEnv env;
  Bytes jobKey;  // never empty
  std::shared_ptr<const Crypto> crypto;
  RegionTable& regions;
  Arena& arena;
  uint64_t life;  // offset of the engine's LifeWord in its arena
  EventLoop& loop;
  // Loops of the connections that carry bulk data. Empty: the first loop serves them, too.
  std::vector<EventLoop*> dataLoops = {};
  // Returns whether a peer that has proved itself may begin a channel, or make ours again. Called
  // on the loop's thread, right before the peer is welcomed. Null: it may.
  std::function<bool(const EngineId& peer)> admits = nullptr;
  // If true, a peer whose channel has ended for good may begin another.
  bool peersReturn = false;
  // How long a peer's kernel may be silent before a connection counts as broken. 0: no limit here,
  // as liveness watches the peers.
  std::chrono::milliseconds deadAfter{0};
  // Called when a peer has connected to us and proved that it knows the key. On the loop's thread.
  std::function<void(EngineId peer, std::shared_ptr<Channel>)> onAccepted;
  // Called when a peer's message arrives. On the loop's thread; the bytes live until it returns.
  std::function<void(EngineId peer, ByteView message)> onMessage;
  // Called when the channel ends other than by our close(). Once per channel, and once more after
  // each reconnection. A goodbye may follow a break. On the loop's thread.
  std::function<void(EngineId peer, const Evidence& evidence)> onEnded;
  // Called when a peer has connected again and our channel to it works again, whether or not we had
  // seen it break. On the loop's thread.
  std::function<void(EngineId peer)> onReconnected;
};

// Number of bytes that network cards have moved by themselves for an engine.
struct CardCounters {
  uint64_t read = 0;     // by gets: moved by our cards, or by the owner's cards for us
  uint64_t written = 0;  // by writes
  uint64_t retried = 0;  // that cards failed to move; sent once more
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual const char* name() const = 0;
  // Returns the address that a peer needs to connect. Opaque to everything but this transport.
  virtual Bytes endpoint() const = 0;
  // Begins a channel to the engine `peer`, which published `endpoint` for this transport. The
  // result must be destroyed before the transport. kUnsupported: this wire does not reach it
  // (another host).
  virtual Result<std::unique_ptr<Connecting>> connect(const EngineId& peer, ByteView endpoint,
                                                      Deadline deadline) = 0;
  // Asks whether something listens at this endpoint. On the loop's thread; `done` runs there once,
  // by the deadline, and not after shutdown(). kUnknown: this wire cannot tell.
  enum class Listener { kAnswers, kRefuses, kNoAnswer, kUnknown };
  virtual void probe(ByteView, Deadline, std::function<void(Listener)> done) {
    done(Listener::kUnknown);
  }
  // Tries once to reconnect a channel that connect() opened and whose connection broke
  // (Evidence::kUnreachable). The channel object stays the same, and stays fenced if it was.
  // Transfers that were under way at the break are lost, and requests until the reconnection fail
  // with kPeerLost: neither is kept here. On the loop's thread; `done` runs there once, by the
  // deadline, and not after shutdown(). kUnsupported: this wire cannot reconnect. kAborted: the
  // channel is closed.
  virtual void reconnect(const EngineId&, const std::shared_ptr<Channel>&, ByteView, Deadline,
                         std::function<void(Status)> done) {
    done({ErrorCode::kUnsupported, "this wire does not connect again"});
  }
  virtual CardCounters cardCounters() const { return {}; }
  // Returns the number of network cards that the wire's data go over; 0 if it uses none.
  virtual size_t cardCount() const { return 0; }
  // Stops listening and closes the accepted connections. Handshakes under way may still end on the
  // loop, so stop the loop before destroying the transport.
  virtual void shutdown() = 0;
};

}  // namespace mooncake
