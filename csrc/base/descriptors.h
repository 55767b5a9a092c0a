#pragma once

#include <cstddef>
#include <string>

#include "base/result.h"

// How many files and sockets this process may have open (RLIMIT_NOFILE). Every rank that is reached
// over a socket costs one descriptor, and some more while much is fetched from it over TCP.
namespace mooncake {

// Raises the soft limit, which is 1024 as a rule, to the hard one: that takes no privilege. A
// program that needs the lower one, because it calls select(2), sets it again afterwards.
void raiseDescriptorLimit();

// Whether so many more fit. kExhausted says how many are needed, what the limit is and how to raise
// it.
Status checkDescriptors(size_t more, const std::string& what);

// For messages: what the limit is and how to raise it.
std::string describeDescriptorLimit();

}  // namespace mooncake
