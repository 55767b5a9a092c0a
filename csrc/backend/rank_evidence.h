#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "group/group.h"

namespace mooncake {

// What is known of the end of a rank.
struct RankEvidence {
  int rank = 0;  // of the group
  std::string kind;
  std::string detail;
  std::chrono::steady_clock::time_point when;
};

// Of the ranks of the group of which we have seen the end or know who has, in rank order.
// `jobRank`: of a rank of the group.
std::vector<RankEvidence> evidenceIn(const Group& group, const std::function<int(int)>& jobRank);

}  // namespace mooncake
