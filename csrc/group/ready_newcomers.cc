#include "group/ready_newcomers.h"

namespace mooncake {

void ReadyNewcomers::forget(const Successor& successor) {
  for (const Newcomer& newcomer : successor.newcomers) ready_.erase(newcomer.rank);
  for (const int rank : successor.absent) ready_.erase(rank);
}

bool ReadyNewcomers::isReady(int rank) const {
  const auto newcomer = ready_.find(rank);
  return newcomer != ready_.end() && members_.isLiving({rank, newcomer->second});
}

std::vector<Newcomer> ReadyNewcomers::of(const std::vector<int>& ranks,
                                         std::vector<int>& missing) const {
  std::vector<Newcomer> newcomers;
  for (const int rank : ranks) {
    if (isReady(rank)) {
      newcomers.push_back({rank, ready_.at(rank)});
    } else {
      missing.push_back(rank);
    }
  }
  return newcomers;
}

}  // namespace mooncake
