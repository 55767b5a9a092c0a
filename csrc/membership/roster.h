#pragma once

#include <memory>
#include <vector>

#include "engine/peers/peer.h"
#include "membership/term.h"

namespace mooncake {

// The members of a job in one term, with the routes to them. A group keeps the roster with which it
// was made: a rank that is replaced later stays out of that group (Membership::viewOf).
struct Roster {
  Term term;
  // By rank. Null for this process, for a rank that is out, and for a newcomer to which this process
  // has no connection, which the next view takes out.
  std::vector<std::shared_ptr<Peer>> peers;

  int size() const { return term.size(); }
  const std::shared_ptr<Peer>& peer(int rank) const { return peers[size_t(rank)]; }
};

}  // namespace mooncake
