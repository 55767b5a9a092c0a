#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/result.h"
#include "engine/nic/topology.h"

namespace mooncake::transfer {

// The names of a list that commas separate.
std::vector<std::string> listOf(const std::string& text);

// JSON: every memory location of this host with [[preferred NICs], [others]], of those in `devices`
// (names separated by commas; empty: all RDMA devices); MC_CUSTOM_TOPO_JSON wins.
std::string describeTopology(const std::string& devices);
NicTopology topologyOf(const std::vector<std::string>& devices);

// The cards of a topology and the links to segments, by name, for people or as JSON:
// {"local_nics": [{"device": ..., ...}], "topology": {...}, "links": {"name": "wire", ...}}. What
// only an RDMA device has (its GID, port, speed) is left at the values for "not known".
std::string describeLinks(const NicTopology& topology,
                          const std::map<std::string, std::string>& links, bool asJson);

// The devices of a NIC priority matrix, {"cpu:0": [["preferred", ...], ["other", ...]]}, or of a
// plain list, separated by commas. kInvalidArgument says where a matrix is wrong.
Result<std::string> devicesOfMatrix(const std::string& text);

}  // namespace mooncake::transfer
