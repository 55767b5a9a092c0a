#pragma once

#include <map>
#include <string>
#include <vector>

#include "wires/nic/fabric_env.h"

namespace mooncake {

// Says which network cards are near which memory. Locations are "cpu:NODE" (a NUMA node) and
// "cuda:INDEX" (a GPU, numbered by PCI address as the driver does).
class NicTopology {
 public:
  struct Cards {
    std::vector<std::string> preferred, others;
  };

  // Reads sysfs for these cards (network interfaces or RDMA devices); if none is named, for all
  // RDMA devices. A GPU prefers the cards on its own node that the fewest PCIe bridges separate
  // from it. A node prefers its own cards.
  static NicTopology discover(const std::vector<std::string>& cards = {},
                              const std::string& sysfs = "/sys");
  // Reads {"cpu:0": [["preferred", ...], ["other", ...]], ...}. kInvalidArgument tells the position
  // of the error.
  static Result<NicTopology> parse(const std::string& json);
  // Reads MC_CUSTOM_TOPO_JSON if it is set, else calls discover().
  static Result<NicTopology> load(const FabricEnv& env, const std::vector<std::string>& cards = {},
                                  const std::string& sysfs = "/sys");

  const std::map<std::string, Cards>& locations() const { return locations_; }
  // Returns preferred cards first. kLocal leaves out the other cards, unless none is preferred. For
  // an unknown location, returns all cards.
  std::vector<std::string> choose(const std::string& location, NicSelection selection) const;
  std::string json() const;

 private:
  std::map<std::string, Cards> locations_;
};

// Returns the location of the processor that this thread runs on: "cpu:0".
std::string locationOfThisThread();

}  // namespace mooncake
