#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "wires/nic/nic.h"
#include "wires/packets/fair_shares.h"

namespace mooncake {

class Rails;

// A peer's card, as an entry of the address table of one of our cards. Void once that card has
// another generation.
struct RailPeer {
  NicPeer number = 0;
  uint64_t generation = 0;
};

// The number of operations that one channel has under way on each card. Lives longer than the
// operations, and shorter than the rails.
class RailShare {
 public:
  explicit RailShare(Rails& rails);
  ~RailShare();
  RailShare(const RailShare&) = delete;
  RailShare& operator=(const RailShare&) = delete;

 private:
  friend class Rail;
  Rails& rails_;
  std::vector<FairShares::Owner> owners_;  // by rail; each is guarded by that rail's lock
};

// Work that a channel submits to one card: a packet to send, or a piece of memory to read or write.
// Belongs to the card from begin() until its completion, and to a queue of the rail before that.
class RailOperation {
 public:
  virtual ~RailOperation() = default;
  // Gives the work to the card, with `this` as the context. Under the rail's lock.
  virtual Status begin(Nic& nic) = 0;
  // Called once, on a polling thread and without a lock. Also called if the operation never began.
  virtual void end(const NicCompletion& how) = 0;
  virtual RailShare& share() const = 0;
  // Generation of the card for which the operation was made. It begins on no other. 0: on any.
  virtual uint64_t generation() const { return 0; }
  // Whether the memory is reused as soon as the operation has ended. Then an operation that the
  // card abandons ends only when the card is closed, which happens at once.
  virtual bool endsWithTheCard() const { return false; }
};

}  // namespace mooncake
