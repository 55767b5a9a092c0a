#pragma once

#include <memory>
#include <vector>

#include "engine/peers/peer.h"
#include "membership/term.h"

namespace mooncake {

// The members of a job in one term, with the routes to them. A group keeps the roster with which it
// was made: a rank that is replaced later stays out of that group (Membership::viewOf).
struct Roster {
  // In a list of ranks of the job: a place of a group that no rank has had yet.
  static constexpr int kNobody = -1;

  Term term;
  // By rank. Null for this process, for a rank that is out, and for a newcomer to which this process
  // has no connection, which the next view takes out.
  std::vector<std::shared_ptr<Peer>> peers;

  int size() const { return term.size(); }
  // Null and false for kNobody and other numbers that are no ranks of the job.
  const std::shared_ptr<Peer>& peer(int rank) const {
    static const std::shared_ptr<Peer> kNone;
    return isRank(rank) ? peers[size_t(rank)] : kNone;
  }
  bool isHeld(int rank) const { return isRank(rank) && term.holders[size_t(rank)]; }
  bool isRank(int rank) const { return rank >= 0 && rank < size(); }
};

}  // namespace mooncake
