#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/result.h"
#include "wires/nic/topology.h"

namespace mooncake::transfer {

// Splits a list at its commas.
std::vector<std::string> listOf(const std::string& text);

// Returns JSON: each memory location of this host with [[preferred NICs], [other NICs]]. Lists only
// NICs named in `devices` (separated by commas; empty: all RDMA devices). MC_CUSTOM_TOPO_JSON
// overrides it.
std::string describeTopology(const std::string& devices);
NicTopology topologyOf(const std::vector<std::string>& devices);

// Describes the cards of a topology and the links to segments, by name, as text or as JSON:
// {"local_nics": [{"device": ..., ...}], "topology": {...}, "links": {"name": "wire", ...}}. The
// GID, port and speed of a card have the values for "not known".
std::string describeLinks(const NicTopology& topology,
                          const std::map<std::string, std::string>& links, bool asJson);

// Returns the devices of a NIC priority matrix, {"cpu:0": [["preferred", ...], ["other", ...]]}, or
// a plain list, separated by commas, as it is. kInvalidArgument: the matrix has an error, which the
// message locates.
Result<std::string> devicesOfMatrix(const std::string& text);

}  // namespace mooncake::transfer
