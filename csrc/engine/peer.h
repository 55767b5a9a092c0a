#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "engine/evidence.h"
#include "engine/peer_process.h"
#include "engine/transports/transport.h"

namespace mooncake {

// Another engine, as this one sees it.
struct Peer : std::enable_shared_from_this<Peer> {
  EngineId id;
  std::string name;                  // for the log, once connect() has told it: "rank 3"
  std::shared_ptr<Channel> channel;  // the route to it
  // Nothing comes from it any more, and nothing reaches it: it said goodbye, its process ended, or
  // the connection is lost. `evidence` says which, and was written before. The process may live on,
  // and touch what it maps: see hasExited() and LeaseTable.
  std::atomic<bool> disconnected{false};
  Evidence evidence;
  PeerProcess process;
  bool isOurs = false;  // to call, also when the connection broke; else it calls
  // Under the engine's lock: it is being forgotten here, and about to be disconnected. Whoever asks
  // for it now is to get the next one.
  bool isBeingForgotten = false;

  // Its process has certainly ended, so nothing of it touches memory any more. Only on our host,
  // else false. False, too, for one that said goodbye and that our pid namespace does not show.
  bool hasExited() const;
  // It was shut out, or is gone, and may be in the middle of a store into our memory.
  bool hasLateWrites() const { return channel->hasLateWrites() && !hasExited(); }
  // What it had published when it exited or said goodbye; empty: nothing. Not for the living. Null:
  // nobody here can know.
  std::optional<Bytes> lastReport() const;
};

}  // namespace mooncake
