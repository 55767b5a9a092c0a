#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "group/group.h"
#include "group/line_members.h"
#include "group/line_words.h"

// What calls of GroupLine::recover() and remove() see of the present series, and the errors that they
// end with.
namespace mooncake {

// The lowest member. Two ranks think so of themselves if one does not know of a loss yet.
int proposerOf(const Group& group);
std::vector<bool> activeOf(const Group& group);  // by rank
// By rank: what remove() can take out. With `keepsLost`, also ranks that the series has lost.
std::vector<bool> membersOf(const Group& group, const LineMembers& line, bool keepsLost);
// False: newcomers are in already, as the member that asks is behind, or all ranks that are to leave
// are out. `members`: by rank, active ones and lost ones that are to be taken out.
bool isChange(const std::vector<bool>& active, const std::vector<bool>& members,
              const Successor& wanted);
// Into the successor, which has its newcomers: the ranks that are out, or `leave`, in order.
void setAbsent(const std::vector<bool>& active, const std::vector<int>& leave,
               Successor& successor);
// Into the successor: which ranks are retired, and the number of ranks that programs see. A loss
// changes neither. `retired`: of the present series.
void setExtent(const Group& group, std::vector<int> retired, Successor& successor);
// True: members are in a call that this rank has not begun, and the line moves behind it. The thread
// that would begin it may be the one that waits.
bool waitsForCaller(const Group& group);

Error notReady(const Group& group, const std::vector<int>& missing);
// `why`: the answer of the wait for the end of the series.
Error notMoved(const Group& group, const Successor& wanted, const Status& why);
Error anotherChange(const Group& group);
// Of a rank that takes itself out while other members are in a call, and is still needed.
Error notYetOut(const Group& group);
Error notLetIn(const GroupOptions& group);
GroupOptions withExtent(GroupOptions options, int extent);
GroupOptions withMembers(GroupOptions options, const Successor& successor);
// Of each call of a rank that is out and may come back. SGLang looks for "invalid state" and "rank is
// not active". `how`: "was taken out ...".
Error notActive(const Group& group, const std::string& how);

}  // namespace mooncake
