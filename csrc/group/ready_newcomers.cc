#include "group/ready_newcomers.h"

#include <algorithm>
#include <cstring>

namespace mooncake {

void ReadyNewcomers::forget(const Successor& successor) {
  for (const Newcomer& newcomer : successor.newcomers) ready_.erase(newcomer.rank);
  for (const int rank : successor.absent) ready_.erase(rank);
}

uint64_t ReadyNewcomers::keyOf(int rank) const {
  const auto newcomer = ready_.find(rank);
  const bool isReady = newcomer != ready_.end() && members_.isLiving({rank, newcomer->second});
  return isReady ? keyOf(newcomer->second) : 0;
}

// Ids are random. Programs have signed numbers.
uint64_t ReadyNewcomers::keyOf(const EngineId& id) {
  uint64_t key;
  std::memcpy(&key, id.data(), sizeof(key));
  return std::max<uint64_t>(key >> 1, 1);
}

std::vector<Newcomer> ReadyNewcomers::of(const std::vector<int>& ranks,
                                         std::vector<int>& missing) const {
  std::vector<Newcomer> newcomers;
  for (const int rank : ranks) {
    if (keyOf(rank) != 0) {
      newcomers.push_back({rank, ready_.at(rank)});
    } else {
      missing.push_back(rank);
    }
  }
  return newcomers;
}

}  // namespace mooncake
