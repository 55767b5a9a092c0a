#pragma once

#include <atomic>
#include <cstdint>

namespace mooncake {

// How a channel shuts out a peer that may still live.
class Fences {
 public:
  virtual ~Fences() = default;

  // The peer is out, and may not know it. From the return of this on no put or write of it lands
  // here, not even the rest of one that has begun, and none of its gets is served: it is told
  // kAborted. Our own gets and writes over a socket end so, too; what is mapped here stays
  // readable. Messages still pass both ways. Does not wait for the peer: where it stores into
  // memory that it maps, one store that it was in the middle of may still come (of a write up to
  // 1 MiB), so that memory must not be used again: of puts at all, of writes while
  // hasLateWrites().
  virtual void fence() = 0;
  // The first half of fence(): no transfer of the peer begins, and transfers under way are given
  // up. The caller then calls fence(). If several peers are lost, the caller first calls this for
  // all of them: their transfers then end in parallel, within one grace period.
  virtual void beginFence() {}
  // Returns whether the peer has not finished a store into memory that it maps, which it was in
  // when we fenced it or closed the channel. If its process ends there, this stays true.
  virtual bool hasLateWrites() const { return false; }
  // A word in the peer's mapped arena that turns non-zero when the peer fences us, before it goes
  // on without us. Null if the arena is not mapped. Lives as long as peerArena().
  virtual const std::atomic<uint32_t>* fenceWord() const { return nullptr; }
};

}  // namespace mooncake
