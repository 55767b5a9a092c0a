#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "group/line_members.h"
#include "group/line_words.h"

namespace mooncake {

// The newcomers that have said that they wait to be let in. The caller serializes the calls
// (GroupLine's lock).
class ReadyNewcomers {
 public:
  explicit ReadyNewcomers(const LineMembers& members) : members_(members) {}

  void note(const Newcomer& newcomer) { ready_[newcomer.rank] = newcomer.id; }
  // One that is let in, and a rank that is taken out, waits no more.
  void forget(const Successor& successor);
  void forgetAll() { ready_.clear(); }
  // Names the process that is ready for this rank; 0: none is.
  uint64_t keyOf(int rank) const;
  static uint64_t keyOf(const EngineId& id);  // never 0
  // Of these ranks. Into `missing`: ranks for which none is ready.
  std::vector<Newcomer> of(const std::vector<int>& ranks, std::vector<int>& missing) const;

 private:
  const LineMembers& members_;
  std::map<int, EngineId> ready_;  // by rank
};

}  // namespace mooncake
