#pragma once

#include <cstddef>
#include <cstdint>

#include "base/result.h"
#include "engine/contract/life_word.h"

namespace mooncake {

// How both ends of a channel see that the other one lives, and the state of its connections.
class LifeSigns {
 public:
  virtual ~LifeSigns() = default;

  // The peer's life word if it is mapped. Lives as long as peerArena().
  virtual PeerLife peerLife() const { return {}; }
  // Returns whether a broken connection is made again, so that the peer may call once more.
  virtual bool isMadeAgain() const { return false; }
  // Number of bytes received. Neither this nor beat() is used where a life word is mapped, which
  // says more.
  virtual uint64_t lifeSigns() const { return 0; }
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
};

}  // namespace mooncake
