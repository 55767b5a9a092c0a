#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <sys/types.h>
#include <vector>

#include "engine/contract/transport.h"
#include "wires/local/arena_offer.h"
#include "wires/local/local_channel.h"
#include "wires/stream/handshake.h"

namespace mooncake {

// The differences between wires whose peers map each other's arena: which peers they reach, and how
// memory outside the arena is read.
class LocalWire {
 public:
  virtual ~LocalWire() = default;

  virtual const char* name() const = 0;
  // Returns whether the wire leads to this process; 0: not visible in our pid namespace.
  virtual bool leadsTo(pid_t process) const = 0;
  // Returns this engine's greeting for the wire at the other end.
  virtual Greeting greeting() const = 0;
  // Null: the peer answers gets over the socket. `arena` outlives the reader.
  virtual std::unique_ptr<DirectReader> reader(pid_t process, const Greeting& greeting,
                                               const ArenaMapping& arena) const = 0;
  // Returns when no peer in this process uses this engine any more.
  virtual void shutdown() {}
};

// Connects over an abstract unix socket: a handshake, then offers of the arenas. After that, frames
// carry everything that load and store cannot do. Leaves nothing behind, however the process ends.
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
  // Tasks on the loop share it (weakly), because handshakes may end after the transport.
  std::shared_ptr<Core> core_;
};

}  // namespace mooncake
