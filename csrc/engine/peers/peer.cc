#include "engine/peers/peer.h"

namespace mooncake {

bool Peer::hasExited() const {
  if (disconnected.load(std::memory_order_acquire) && evidence.kind == Evidence::Kind::kExited)
    return true;
  // After a goodbye its life word is not watched any more.
  return process.isEnding();
}

std::optional<Bytes> Peer::lastReport() const {
  const PeerLife life = channel->peerLife();
  if (!life.word) return std::nullopt;
  return life.word->crashReport.read();
}

}  // namespace mooncake
