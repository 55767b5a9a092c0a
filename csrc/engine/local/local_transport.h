#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <sys/types.h>
#include <vector>

#include "engine/local/arena_offer.h"
#include "engine/local/local_channel.h"
#include "engine/stream/handshake.h"
#include "engine/transports/transport.h"

namespace mooncake {

// In what the wires differ that map each other's arena: whom they lead to, and how memory outside
// the arena is read.
class LocalWire {
 public:
  virtual ~LocalWire() = default;

  virtual const char* name() const = 0;
  // Whether the wire leads to this process; 0 stands for one that our pid namespace does not show.
  virtual bool leadsTo(pid_t process) const = 0;
  // Of this engine, for the wire at the other end.
  virtual Greeting greeting() const = 0;
  // Null: the peer answers gets over the socket. `arena` outlives the reader.
  virtual std::unique_ptr<DirectReader> reader(pid_t process, const Greeting& greeting,
                                               const ArenaMapping& arena) const = 0;
  // Returns when no peer in this process uses this engine any more.
  virtual void shutdown() {}
};

// Connects over an abstract unix socket: handshake, then offers of the arenas, then frames for what
// load and store cannot do. Leaves nothing behind, however the process ends.
class LocalTransport final : public Transport {
 public:
  static Result<std::unique_ptr<Transport>> create(const TransportContext& context,
                                                   std::unique_ptr<LocalWire> wire);
  ~LocalTransport() override;

  const char* name() const override;
  Bytes endpoint() const override;
  Result<std::unique_ptr<Connecting>> connect(const EngineId& peer, ByteView endpoint,
                                              Deadline deadline) override;
  void shutdown() override;

 private:
  class Core;
  class Call;

  LocalTransport(std::string socketName, std::shared_ptr<Core> core)
      : socketName_(std::move(socketName)), core_(std::move(core)) {}

  std::string socketName_;
  // Shared with what waits on the loop (weakly): handshakes may end after the transport.
  std::shared_ptr<Core> core_;
};

}  // namespace mooncake
