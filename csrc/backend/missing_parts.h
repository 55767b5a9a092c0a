#pragma once

#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

#include "backend/calls/collective.h"
#include "group/group.h"

namespace mooncake {

// Warns of results that lack the part of a lost rank where programs go wrong without an error: DDP
// divides a sum by the number of all ranks, and FSDP computes with zeros. One warning for each loss
// of the group. None if the program reads which ranks contribute, in any group, or has given
// active_ranks. Thread-safe.
class MissingParts {
 public:
  // What a program may make of a result.
  enum class Use { kOther, kSumInBackward, kGather };

  // `isWatched`: the program has given active_ranks. The group outlives this object's calls.
  MissingParts(const Group& group, bool isWatched);
  // On the thread that calls it. Our hooks for DDP take the mean, which is right after a loss, too.
  static Use useOf(const Collective& call);
  // The operation that this thread runs has ended well.
  void ended(Use use, const char* verb);
  // The call goes to a kernel. Nothing on the host sees its end, so this looks at the ranks of now.
  void launched(const Collective& call);
  // The program reads which ranks contribute.
  static void noteRead();

 private:
  bool mayWarn() const;
  void note(Use use, const std::string& verb, const GroupView& contributors);

  const Group& group_;
  const bool isWatched_;
  const std::vector<int> members_;  // when the group began
  std::mutex mutex_;                // guards left_
  size_t left_;                     // members at the last warning
};

}  // namespace mooncake
