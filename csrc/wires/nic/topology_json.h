#pragma once

#include <map>
#include <string>

#include "base/result.h"
#include "wires/nic/topology.h"

namespace mooncake {

// {"cpu:0": [["near", ...], ["far", ...]], "cuda:0": ...}: the only JSON form of a topology.
Result<std::map<std::string, NicTopology::Cards>> parseTopologyJson(const std::string& json);
std::string writeTopologyJson(const std::map<std::string, NicTopology::Cards>& locations);

}  // namespace mooncake
