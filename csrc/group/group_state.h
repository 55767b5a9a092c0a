#pragma once

#include <memory>
#include <string>

#include "base/result.h"

namespace mooncake {

class Group;

// What a group is doing as this rank sees it, in words: whom it waits for in which operation, and
// how far every rank has come. Several lines, each ends with a newline. Reads only, takes the flush
// agent's mutex for a moment. Any thread, at any time, also while the group is stuck.
std::string describeState(const Group& group);

// Keeps a group in the list of those that a signal has described. Ends before the group does.
class ListedGroup {
 public:
  explicit ListedGroup(const Group& group);
  ~ListedGroup();
  ListedGroup(const ListedGroup&) = delete;
  ListedGroup& operator=(const ListedGroup&) = delete;

 private:
  const Group& group_;
};

// From now on this signal has the states of all groups of this process written to stderr, by a
// thread of their own: whatever the others are stuck in. Refused when the signal has a handler
// already, or is ignored. Not undone. Forked children do nothing on the signal.
Status describeStatesOnSignal(int signal);

}  // namespace mooncake
