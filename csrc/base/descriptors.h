#pragma once

#include <cstddef>
#include <string>

#include "base/result.h"

// How many files and sockets this process may have open (RLIMIT_NOFILE). Every rank reached over a
// socket costs one descriptor. A bulk fetch from it over TCP costs a few more while it runs.
namespace mooncake {

// Raises the soft limit, usually 1024, to the hard one, which takes no privilege. A program that
// needs the lower limit, because it calls select(2), sets it again afterwards.
void raiseDescriptorLimit();

// Checks that `more` descriptors still fit, with some to spare. kExhausted says how many are
// needed, the limit and how to raise it. `what` is the subject of that message.
Status checkDescriptors(size_t more, const std::string& what);

// Text for error messages: the limit and how to raise it.
std::string describeDescriptorLimit();

}  // namespace mooncake
