#pragma once

#include <memory>
#include <string>

#include "base/result.h"

namespace mooncake {

class Group;

// Describes the state of a group in words, as this rank sees it: its operation, the ranks that it
// waits for, and how far every rank has come. Several lines, each ends with a newline. Only reads;
// takes the flush agent's mutex for a moment. Any thread, any time, also while the group is stuck.
std::string describeState(const Group& group);

// Keeps a group in the list of groups that the signal describes. Destroyed before the group is.
class ListedGroup {
 public:
  explicit ListedGroup(const Group& group);
  ~ListedGroup();
  ListedGroup(const ListedGroup&) = delete;
  ListedGroup& operator=(const ListedGroup&) = delete;

 private:
  const Group& group_;
};

// From now on this signal writes the states of all groups of this process to stderr. A thread of
// its own writes them, also while all other threads are stuck. Refused if the signal has a handler
// already, or is ignored. Cannot be undone. Forked children do nothing on the signal.
Status describeStatesOnSignal(int signal);

}  // namespace mooncake
