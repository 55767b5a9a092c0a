#include "transfer/topology.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <vector>

namespace mooncake::transfer {
namespace {

std::vector<std::string> entriesOf(const char* folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error))
    names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

std::set<int> nodes() {
  std::set<int> found;
  for (const std::string& name : entriesOf("/sys/devices/system/node")) {
    const bool isNode = name.size() > 4 && name.starts_with("node") &&
                        name.find_first_not_of("0123456789", 4) == std::string::npos;
    if (isNode) found.insert(std::stoi(name.substr(4)));
  }
  if (found.empty()) found.insert(0);
  return found;
}

std::string quoted(const std::vector<std::string>& names) {
  std::string text = "[";
  for (const std::string& name : names) text += (text.size() > 1 ? ",\"" : "\"") + name + "\"";
  return text + "]";
}

}  // namespace

std::string describeTopology(const std::string& devices) {
  std::set<std::string> wanted;
  std::istringstream list(devices);
  for (std::string name; std::getline(list, name, ',');) wanted.insert(name);
  std::map<std::string, int> nodeOf;
  for (const std::string& name : entriesOf("/sys/class/infiniband")) {
    if (!wanted.empty() && !wanted.contains(name)) continue;
    int node = -1;
    std::ifstream("/sys/class/infiniband/" + name + "/device/numa_node") >> node;
    nodeOf[name] = std::max(node, 0);
  }
  std::string text = "{";
  for (const int node : nodes()) {
    std::vector<std::string> near, far;
    for (const auto& [name, at] : nodeOf) (at == node ? near : far).push_back(name);
    text += (text.size() > 1 ? ",\"cpu:" : "\"cpu:") + std::to_string(node) + "\":[" +
            quoted(near) + "," + quoted(far) + "]";
  }
  return text + "}";
}

}  // namespace mooncake::transfer
