#pragma once

#include <string>
#include <vector>

#include "base/fabric_env.h"

namespace mooncake {

// What there is of a fabric on this machine, what would be taken of it, and why. For people.
struct FabricFinding {
  bool works = true;
  std::string subject, text;
};
std::vector<FabricFinding> reportFabric(const FabricEnv& env, const std::string& sysfs = "/sys");

}  // namespace mooncake
