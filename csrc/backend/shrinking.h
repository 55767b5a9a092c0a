#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/live_group.h"
#include "membership/member_exchange.h"
#include "membership/rank_set.h"

namespace mooncake {

// Makes a smaller group in place of a group, for torch.distributed.shrink_group: all ranks but the
// excluded ones call it. The two groups share the job. Errors are thrown.
class Shrinking {
 public:
  // Checks the list.
  Shrinking(const LiveGroup& group, std::span<const int64_t> excluded);

  // Collective over the ranks that are left: compares their lists. Does not wait for lost ranks.
  // Excluded ranks are told, too. Otherwise a rank that only some lists exclude would wait.
  void agree();
  // `opts`: of the new group, which takes their timeout; null: it has the timeout of the group.
  BackendOptions options(const c10d::Backend::Options* opts) const;
  // Of this rank in the new group.
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(left_.size()); }

 private:
  Status compare(const std::vector<std::optional<Bytes>>& lists) const;

  const LiveGroup& group_;
  const std::string name_;  // of the new group
  GroupRanks excluded_;
  std::vector<int> left_;  // in the group
  int rank_ = -1;
  // Answers ranks that ask for our list, until the new group is made: then all of them have it.
  std::unique_ptr<MemberExchange> lists_;
};

}  // namespace mooncake
