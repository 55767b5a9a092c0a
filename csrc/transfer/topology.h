#pragma once

#include <string>

namespace mooncake::transfer {

// JSON: every memory location of this host with [[preferred NICs], [others]], of those in `devices`
// (names separated by commas; empty: all RDMA devices); MC_CUSTOM_TOPO_JSON wins.
std::string describeTopology(const std::string& devices);

}  // namespace mooncake::transfer
