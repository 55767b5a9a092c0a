#include "membership/term.h"

#include <cstring>

#include "base/hash.h"

namespace mooncake {

JobRanks Term::active() const {
  JobRanks ranks;
  for (int rank = 0; rank < size(); ++rank) {
    if (holders[size_t(rank)]) ranks.add(rank);
  }
  return ranks;
}

TermId Term::id() const {
  if (number == 0) return {};
  uint32_t digest = fnv1a({epoch});
  for (int rank = 0; rank < size(); ++rank) {
    const auto& holder = holders[size_t(rank)];
    if (!holder) continue;
    uint64_t low = 0, high = 0;
    std::memcpy(&low, holder->id.data(), sizeof low);
    std::memcpy(&high, holder->id.data() + sizeof low, sizeof high);
    digest = fnv1a({uint64_t(rank), low, high}, digest);
  }
  return {number, digest};
}

std::optional<int> Term::rankOf(const EngineId& id) const {
  for (int rank = 0; rank < size(); ++rank) {
    const auto& holder = holders[size_t(rank)];
    if (holder && holder->id == id) return rank;
  }
  return std::nullopt;
}

bool Term::hasSameHolder(const Term& other, int rank) const {
  if (rank < 0 || rank >= size() || rank >= other.size()) return false;
  const auto& here = holders[size_t(rank)];
  const auto& there = other.holders[size_t(rank)];
  return here && there && here->id == there->id;
}

}  // namespace mooncake
