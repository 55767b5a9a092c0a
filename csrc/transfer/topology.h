#pragma once

#include <string>

namespace mooncake::transfer {

// JSON: every memory location of this host with [[preferred NICs], [others]], of those in `devices`
// (names separated by commas; empty: all). A NIC is preferred by the NUMA node that it is at.
std::string describeTopology(const std::string& devices);

}  // namespace mooncake::transfer
