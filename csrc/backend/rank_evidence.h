#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "group/group.h"

namespace mooncake {

// Evidence of the end of a rank.
struct RankEvidence {
  int rank = 0;  // of the group
  std::string kind;
  std::string detail;
  std::chrono::steady_clock::time_point when;
};

// Returns the evidence about ranks of the group, in rank order: our own, and the peers'.
// `jobRank` returns the global rank of a rank of the group.
std::vector<RankEvidence> evidenceIn(const Group& group, const std::function<int(int)>& jobRank);

}  // namespace mooncake
