#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/contract/engine_id.h"
#include "membership/rank_set.h"

namespace mooncake {

// Names a term: the number of terms of the job that were closed before it, and a digest of its
// holders. The digest tells apart two terms of one number, of which only one has living members.
struct TermId {
  uint32_t number = 0;
  uint32_t digest = 0;  // 0 in the first term, which is the only one of its number

  bool operator==(const TermId&) const = default;
};

// The process that holds a rank.
struct Holder {
  EngineId id{};
  uint32_t since = 0;  // number of the term in which it became a rank of the job

  bool operator==(const Holder&) const = default;
};

// Which process holds each rank of the job, from one admission to the next. A value that never
// changes: an admission closes a term, and the next one begins.
struct Term {
  uint32_t number = 0;                         // number of terms before it
  uint64_t epoch = 1;                          // of the view with which the term begins
  std::vector<std::optional<Holder>> holders;  // by rank; null: the rank is out

  int size() const { return static_cast<int>(holders.size()); }
  // Ranks that are filled.
  JobRanks active() const;
  TermId id() const;
  // Returns the rank of this process, or null if it has none in this term.
  std::optional<int> rankOf(const EngineId& id) const;
  // Returns whether the rank is filled here and held by the same process in `other`.
  bool hasSameHolder(const Term& other, int rank) const;

  bool operator==(const Term&) const = default;
};

}  // namespace mooncake
