#pragma once

#include "group/operation.h"

namespace mooncake {

// Ends when every rank has begun it.
class Barrier : public Algorithm {
 public:
  Status publish(Operation& op) override;
  Status complete(Operation& op) override;
};

// Cost: one exchange of slots, n-1 signals per rank. (The dissemination barrier of Hensgen, Finkel
// and Manber needs log2(n) rounds of one signal; we exchange all slots anyway, so that every rank
// learns the calls of all other ranks.)
Status barrier(Group& group, Deadline deadline);

}  // namespace mooncake
