#include "transfer/topology.h"

#include <algorithm>
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

Result<std::string> devicesOfMatrix(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\n");
  if (first == std::string::npos || text[first] != '{') return text;
  const auto topology = NicTopology::parse(text);
  if (!topology.ok()) return topology.error();
  std::vector<std::string> names;
  for (const auto& [location, cards] : topology->locations()) {
    for (const auto* some : {&cards.preferred, &cards.others}) {
      for (const std::string& name : *some) {
        if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
      }
    }
  }
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ",") + name;
  return list;
}

}  // namespace mooncake::transfer
