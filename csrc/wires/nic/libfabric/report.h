#pragma once

#include <string>
#include <vector>

#include "wires/nic/fabric_env.h"

namespace mooncake {

// Lists the fabric of this machine, and the cards that would be used, with reasons. For people.
struct FabricFinding {
  bool works = true;
  std::string subject, text;
};
std::vector<FabricFinding> reportFabric(const FabricEnv& env, const std::string& sysfs = "/sys");

}  // namespace mooncake
