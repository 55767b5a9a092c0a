#pragma once

#include <string>
#include <vector>

#include "base/result.h"

namespace mooncake::transfer {

// The names of a list that commas separate.
std::vector<std::string> listOf(const std::string& text);

// JSON: every memory location of this host with [[preferred NICs], [others]], of those in `devices`
// (names separated by commas; empty: all RDMA devices); MC_CUSTOM_TOPO_JSON wins.
std::string describeTopology(const std::string& devices);

// The devices of a NIC priority matrix, {"cpu:0": [["preferred", ...], ["other", ...]]}, or of a
// plain list, separated by commas. kInvalidArgument says where a matrix is wrong.
Result<std::string> devicesOfMatrix(const std::string& text);

}  // namespace mooncake::transfer
