#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "engine/contract/evidence.h"
#include "engine/contract/transport.h"
#include "engine/peers/peer_process.h"

namespace mooncake {

// Another engine, as this one sees it.
struct Peer : std::enable_shared_from_this<Peer> {
  EngineId id;
  std::string name;                  // for the log, such as "rank 3"; connect() and open() set it
  std::shared_ptr<Channel> channel;  // the route to it
  // Nothing comes from the peer any more, and nothing reaches it: it said goodbye, its process
  // ended, or the connection is lost. `evidence` says which, and is written first. The process may
  // live on and touch memory that it maps: see hasExited() and LeaseTable.
  std::atomic<bool> disconnected{false};
  Evidence evidence;
  PeerProcess process;
  bool isOurs = false;  // this side calls, also after a break; else the peer calls
  // Under the engine's lock: this side is forgetting the peer and about to disconnect it. A caller
  // that asks for the peer now gets a new object.
  bool isBeingForgotten = false;
  // Under the engine's lock: Engine::endpoint() of the peer, once it is disconnected or forgotten.
  Bytes lastEndpoint;

  // Returns whether the process has certainly ended, so that it touches no memory any more. Always
  // false for a peer on another host. Also false after a goodbye, if our pid namespace does not
  // show the process.
  bool hasExited() const;
  // Returns whether the peer was fenced or is gone, and may be in the middle of a store into our
  // memory.
  bool hasLateWrites() const { return channel->hasLateWrites() && !hasExited(); }
  // Returns the report that the peer had published when it exited or said goodbye; empty: none. Do
  // not call it while the peer lives. Null: its memory is not mapped here.
  std::optional<Bytes> lastReport() const;
};

}  // namespace mooncake
