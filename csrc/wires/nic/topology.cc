#include "wires/nic/topology.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>
#include <sys/syscall.h>
#include <unistd.h>

#include "wires/nic/topology_json.h"

namespace mooncake {
namespace {

namespace fs = std::filesystem;

struct Device {
  std::string name;
  int node = 0;
  std::vector<std::string> bridges;  // from the root to the device itself
};

std::vector<std::string> entriesOf(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error))
    names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

template <typename T>
T readFrom(const fs::path& path, T otherwise) {
  std::ifstream file(path);
  T value;
  return file >> value ? value : otherwise;
}

// `at` is the path to the folder of a PCI device.
Device deviceAt(const std::string& name, const fs::path& at) {
  Device device{.name = name};
  // The kernel reports -1 on machines with one node.
  device.node = std::max(readFrom(at / "numa_node", 0), 0);
  std::error_code error;
  const fs::path real = fs::canonical(at, error);
  for (const fs::path& part : real) {
    if (part.string().find(':') != std::string::npos) device.bridges.push_back(part);
  }
  return device;
}

std::vector<Device> cardsOf(const fs::path& sysfs, const std::vector<std::string>& names) {
  std::vector<Device> cards;
  std::error_code error;
  for (const std::string& name : names.empty() ? entriesOf(sysfs / "class/infiniband") : names) {
    if (name.find('/') != std::string::npos) continue;
    const fs::path rdma = sysfs / "class/infiniband" / name / "device";
    const bool isRdma = fs::exists(rdma, error);
    cards.push_back(deviceAt(name, isRdma ? rdma : sysfs / "class/net" / name / "device"));
  }
  return cards;
}

// Returns the GPUs in the order of their PCI addresses, as the driver numbers GPUs of one kind.
std::vector<Device> gpusOf(const fs::path& sysfs) {
  constexpr const char* kNvidia = "0x10de";
  const fs::path all = sysfs / "bus/pci/devices";
  std::vector<Device> gpus;
  for (const std::string& address : entriesOf(all)) {
    if (readFrom<std::string>(all / address / "vendor", "") != kNvidia) continue;
    const auto kind = readFrom<std::string>(all / address / "class", "");
    const bool isGpu = kind.starts_with("0x0300") || kind.starts_with("0x0302");
    if (isGpu) gpus.push_back(deviceAt("cuda:" + std::to_string(gpus.size()), all / address));
  }
  return gpus;
}

std::set<int> nodesOf(const fs::path& sysfs) {
  std::set<int> found;
  for (const std::string& name : entriesOf(sysfs / "devices/system/node")) {
    const bool isNode = name.size() > 4 && name.starts_with("node") &&
                        name.find_first_not_of("0123456789", 4) == std::string::npos;
    if (isNode) found.insert(std::stoi(name.substr(4)));
  }
  if (found.empty()) found.insert(0);
  return found;
}

// Number of steps from one device to the other, by way of the last bridge that they share.
size_t distance(const Device& a, const Device& b) {
  const auto [atA, atB] =
      std::mismatch(a.bridges.begin(), a.bridges.end(), b.bridges.begin(), b.bridges.end());
  return static_cast<size_t>(std::distance(atA, a.bridges.end()) +
                             std::distance(atB, b.bridges.end()));
}

NicTopology::Cards nearest(const Device& gpu, const std::vector<Device>& cards) {
  size_t least = std::numeric_limits<size_t>::max();
  for (const Device& card : cards) {
    if (card.node == gpu.node) least = std::min(least, distance(gpu, card));
  }
  NicTopology::Cards sorted;
  for (const Device& card : cards) {
    const bool isNear = card.node == gpu.node && distance(gpu, card) == least;
    (isNear ? sorted.preferred : sorted.others).push_back(card.name);
  }
  return sorted;
}

}  // namespace

NicTopology NicTopology::discover(const std::vector<std::string>& names, const std::string& sysfs) {
  const std::vector<Device> cards = cardsOf(sysfs, names);
  NicTopology topology;
  for (const int node : nodesOf(sysfs)) {
    Cards& sorted = topology.locations_["cpu:" + std::to_string(node)];
    for (const Device& card : cards)
      (card.node == node ? sorted.preferred : sorted.others).push_back(card.name);
  }
  for (const Device& gpu : gpusOf(sysfs)) topology.locations_[gpu.name] = nearest(gpu, cards);
  return topology;
}

Result<NicTopology> NicTopology::parse(const std::string& json) {
  auto locations = parseTopologyJson(json);
  if (!locations.ok()) return locations.error();
  NicTopology topology;
  topology.locations_ = std::move(*locations);
  return topology;
}

Result<NicTopology> NicTopology::load(const FabricEnv& env, const std::vector<std::string>& cards,
                                      const std::string& sysfs) {
  if (env.topologyPath.empty()) return discover(cards, sysfs);
  std::ifstream file(env.topologyPath);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) {
    return Error{ErrorCode::kInvalidArgument,
                 "MC_CUSTOM_TOPO_JSON=\"" + env.topologyPath + "\" cannot be read"};
  }
  auto parsed = parse(text.str());
  if (parsed.ok()) return parsed;
  return Error{ErrorCode::kInvalidArgument,
               "MC_CUSTOM_TOPO_JSON=\"" + env.topologyPath + "\": " + parsed.error().message};
}

std::vector<std::string> NicTopology::choose(const std::string& location,
                                             NicSelection selection) const {
  const auto found = locations_.find(location);
  if (found != locations_.end()) {
    const auto& [preferred, others] = found->second;
    std::vector<std::string> chosen = preferred;
    if (selection == NicSelection::kAll || preferred.empty())
      chosen.insert(chosen.end(), others.begin(), others.end());
    return chosen;
  }
  std::vector<std::string> all;
  for (const auto& [name, cards] : locations_) {
    for (const auto* list : {&cards.preferred, &cards.others}) {
      for (const std::string& card : *list) {
        if (std::find(all.begin(), all.end(), card) == all.end()) all.push_back(card);
      }
    }
  }
  return all;
}

std::string NicTopology::json() const { return writeTopologyJson(locations_); }

std::string locationOfThisThread() {
  unsigned processor = 0, node = 0;
  if (::syscall(SYS_getcpu, &processor, &node, nullptr) != 0) node = 0;
  return "cpu:" + std::to_string(node);
}

}  // namespace mooncake
