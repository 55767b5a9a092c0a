#include "wires/nic/libfabric/report.h"

#include "wires/nic/libfabric/cards.h"
#include "wires/nic/topology.h"

namespace mooncake {
namespace {

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// Returns the node that prefers a card; "" if the topology does not know the card.
std::string nodeOf(const NicTopology& topology, const std::string& card) {
  for (const auto& [location, cards] : topology.locations()) {
    if (!location.starts_with("cpu:")) continue;
    for (const std::string& name : cards.preferred) {
      if (name == card) return "node " + location.substr(4);
    }
  }
  return "";
}

std::string describe(const LibfabricCard& card, const NicTopology& topology) {
  std::vector<std::string> facts;
  if (!card.pciAddress.empty()) facts.push_back(card.pciAddress);
  if (const std::string node = nodeOf(topology, card.name); !node.empty()) facts.push_back(node);
  if (card.bitsPerSecond != 0)
    facts.push_back(std::to_string(card.bitsPerSecond / 1'000'000'000) + " Gbit/s");
  return facts.empty() ? card.name : card.name + " (" + joined(facts) + ")";
}

std::string reasonFor(const FabricEnv& env, const std::string& provider) {
  if (!env.requiredProvider.empty()) return env.requiredBy + " asks for it";
  if (env.providers.front() == provider) return "the first of MOONCAKE_FABRIC_PROVIDERS";
  return "the first of MOONCAKE_FABRIC_PROVIDERS that has cards";
}

}  // namespace

std::vector<FabricFinding> reportFabric(const FabricEnv& env, const std::string& sysfs) {
  std::vector<FabricFinding> findings;
  const auto library = describeLibfabric(env);
  findings.push_back(
      {library.ok(), "libfabric", library.ok() ? *library : library.error().message});
  if (!library.ok()) return findings;

  const auto cards = listLibfabricCards(env);
  if (!cards.ok()) {
    findings.push_back({false, "network cards", cards.error().message});
    return findings;
  }
  std::vector<std::string> names, described;
  for (const LibfabricCard& card : *cards) names.push_back(card.name);
  const auto topology = NicTopology::load(env, names, sysfs);
  if (!topology.ok()) {
    findings.push_back({false, "network cards", topology.error().message});
    return findings;
  }
  for (const LibfabricCard& card : *cards) described.push_back(describe(card, *topology));
  const std::string& provider = cards->front().provider;
  findings.push_back(
      {true, "network cards",
       joined(described) + "; provider " + provider + ", " + reasonFor(env, provider)});
  for (const auto& [location, unused] : topology->locations()) {
    findings.push_back({true, "cards for " + location,
                        joined(topology->choose(location, env.selection)) +
                            (env.selection == NicSelection::kLocal
                                 ? "; MC_EFA_NIC_SELECTION=local"
                                 : "; nearest first, MC_EFA_NIC_SELECTION=all")});
  }
  return findings;
}

}  // namespace mooncake
