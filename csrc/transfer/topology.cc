#include "transfer/topology.h"

#include <sstream>
#include <vector>

#include "base/log.h"
#include "engine/nic/topology.h"

namespace mooncake::transfer {

std::string describeTopology(const std::string& devices) {
  std::vector<std::string> wanted;
  std::istringstream list(devices);
  for (std::string name; std::getline(list, name, ',');) {
    if (!name.empty()) wanted.push_back(name);
  }
  const auto env = FabricEnv::read();
  auto topology = env.ok() ? NicTopology::load(*env, wanted) : Result<NicTopology>(env.error());
  if (!topology.ok()) {
    log(LogLevel::kWarning, "topology", topology.error().message);
    topology = NicTopology::discover(wanted);
  }
  return topology->json();
}

}  // namespace mooncake::transfer
