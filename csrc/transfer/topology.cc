#include "transfer/topology.h"

#include <sstream>
#include <vector>

#include "base/log.h"
#include "engine/nic/topology.h"

namespace mooncake::transfer {

std::vector<std::string> listOf(const std::string& text) {
  std::vector<std::string> names;
  std::istringstream list(text);
  for (std::string name; std::getline(list, name, ',');) {
    if (!name.empty()) names.push_back(name);
  }
  return names;
}

std::string describeTopology(const std::string& devices) {
  const std::vector<std::string> wanted = listOf(devices);
  const auto env = FabricEnv::read();
  auto topology = env.ok() ? NicTopology::load(*env, wanted) : Result<NicTopology>(env.error());
  if (!topology.ok()) {
    log(LogLevel::kWarning, "topology", topology.error().message);
    topology = NicTopology::discover(wanted);
  }
  return topology->json();
}

}  // namespace mooncake::transfer
