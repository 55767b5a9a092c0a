#pragma once

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
  bool isReady(int rank) const;
  // Of these ranks. Into `missing`: ranks for which none is ready.
  std::vector<Newcomer> of(const std::vector<int>& ranks, std::vector<int>& missing) const;

 private:
  const LineMembers& members_;
  std::map<int, EngineId> ready_;  // by rank
};

}  // namespace mooncake
