#include "transfer/topology.h"

#include <algorithm>
#include <sstream>
#include <utility>
#include <vector>

#include "base/log.h"
#include "wires/nic/topology.h"

namespace mooncake::transfer {
namespace {

// Quotes a JSON string. Drops control characters.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') out += '\\';
    if (static_cast<unsigned char>(letter) >= 0x20) out += letter;
  }
  return out + "\"";
}

}  // namespace

std::vector<std::string> listOf(const std::string& text) {
  std::vector<std::string> names;
  std::istringstream list(text);
  for (std::string name; std::getline(list, name, ',');) {
    if (!name.empty()) names.push_back(name);
  }
  return names;
}

std::string describeTopology(const std::string& devices) {
  return topologyOf(listOf(devices)).json();
}

NicTopology topologyOf(const std::vector<std::string>& wanted) {
  const auto env = FabricEnv::read();
  auto topology = env.ok() ? NicTopology::load(*env, wanted) : Result<NicTopology>(env.error());
  if (!topology.ok()) {
    log(LogLevel::kWarning, "topology", topology.error().message);
    topology = NicTopology::discover(wanted);
  }
  return std::move(*topology);
}

std::string describeLinks(const NicTopology& topology,
                          const std::map<std::string, std::string>& links, bool asJson) {
  std::map<std::string, std::string> nodes;  // NUMA node of each card; "-1": not known
  for (const auto& [location, cards] : topology.locations()) {
    const bool isNode = location.starts_with("cpu:");
    for (const std::string& card : cards.preferred)
      if (isNode) nodes[card] = location.substr(4);
    for (const auto* some : {&cards.preferred, &cards.others})
      for (const std::string& card : *some) nodes.emplace(card, "-1");
  }
  std::string nics, wires;
  for (const auto& [card, node] : nodes) {
    if (asJson) {
      nics += (nics.empty() ? "{\"device\": " : ", {\"device\": ") + quoted(card) +
              ", \"numa\": " + node +
              ", \"gid\": \"\", \"gid_index\": -1, \"port\": 0, \"speed_gbps\": 0, "
              "\"source\": \"topology\"}";
    } else {
      nics += " " + card;
    }
  }
  for (const auto& [name, wire] : links) {
    wires += asJson ? (wires.empty() ? "" : ", ") + quoted(name) + ": " + quoted(wire)
                    : name + " " + wire + "\n";
  }
  if (!asJson) return "local NICs:" + (nics.empty() ? " none" : nics) + "\n" + wires;
  return "{\"local_nics\": [" + nics + "], \"topology\": " + topology.json() + ", \"links\": {" +
         wires + "}}";
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
