#pragma once

#include <string>
#include <vector>

namespace mooncake::transfer {

// The names of a list that commas separate.
std::vector<std::string> listOf(const std::string& text);

// JSON: every memory location of this host with [[preferred NICs], [others]], of those in `devices`
// (names separated by commas; empty: all RDMA devices); MC_CUSTOM_TOPO_JSON wins.
std::string describeTopology(const std::string& devices);

}  // namespace mooncake::transfer
