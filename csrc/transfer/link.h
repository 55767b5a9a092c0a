#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "engine/engine.h"
#include "transfer/errands.h"

namespace mooncake::transfer {

// Bytes from memory that is registered here into memory of a peer.
struct WriteRequest {
  RemoteRegion region;
  uint64_t offset = 0;
  RemoteRegion source;
  uint64_t sourceOffset = 0;
  uint64_t bytes = 0;
  Completion* completion = nullptr;
};

// How the transfer engine uses its engine's channels. Reads are the channel's gets; a write is a
// message to the peer, who gets the bytes itself and answers when it has them.
class Link {
 public:
  explicit Link(Engine& engine);
  ~Link();

  // Null: it is our own endpoint.
  Result<std::shared_ptr<Peer>> open(ByteView endpoint, Deadline deadline);
  // A peer that opens us wants to be opened by us as well.
  void answerCall(const Bytes& endpoint);

  Status get(Peer& peer, const GetRequest& request) { return peer.channel->get(request); }
  Status write(Peer& peer, const WriteRequest& request);
  // The transfers that count at this completion have ended when this returns.
  void cancel(Peer& peer, const Completion* completion);
  // Ends the writes to peers that are gone.
  void endLost();

 private:
  struct Pull {
    std::shared_ptr<Peer> peer;
    Completion* completion;
  };
  void onMessage(const EngineId& from, ByteView message);
  void pull(const EngineId& from, uint64_t id, WriteRequest request);

  Engine& engine_;
  std::mutex mutex_;  // guards what follows
  std::map<uint64_t, Pull> pulls_;
  uint64_t lastPull_ = 0;
  std::map<EngineId, std::weak_ptr<Peer>> peers_;
  Errands calls_;
  Errands copies_;
};

}  // namespace mooncake::transfer
