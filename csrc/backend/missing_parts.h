#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "backend/calls/collective.h"
#include "base/mutex.h"
#include "group/group_line.h"

namespace mooncake {

// Warns of results that lack the part of a lost rank where programs go wrong without an error: DDP
// divides a sum by the number of all ranks, and FSDP computes with zeros. One warning for each loss
// of the group. None if the program reads which ranks contribute, in any group, or has given
// active_ranks. Thread-safe.
class MissingParts {
 public:
  // What a program may make of a result.
  enum class Use { kOther, kSumInBackward, kGather };

  // `isWatched`: the program has given active_ranks. The line outlives this object's calls.
  MissingParts(const GroupLine& line, bool isWatched);
  // On the thread that calls it. Our hooks for DDP take the mean, which is right after a loss, too.
  static Use useOf(const Collective& call);
  // The group has moved to this series: its members are counted anew.
  void movedTo(const Group& series);
  // The operation that this thread runs has ended well.
  void ended(Use use, const char* verb, const Group& series);
  // The call goes to a kernel. Nothing on the host sees its end, so this looks at the ranks of now.
  void launched(const Collective& call);
  // The program reads which ranks contribute.
  static void noteRead();

 private:
  bool mayWarn() const;
  void note(Use use, const std::string& verb, const Group& series, const GroupView& contributors);

  const GroupLine& line_;
  const bool isWatched_;
  Mutex mutex_;
  std::vector<int> members_ GUARDED_BY(mutex_);  // when the series began
  size_t left_ GUARDED_BY(mutex_);               // members at the last warning
};

}  // namespace mooncake
