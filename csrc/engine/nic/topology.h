#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/fabric_env.h"

namespace mooncake {

// Which network cards are near which memory. Locations are "cpu:NODE" (a NUMA node) and
// "cuda:INDEX" (a GPU, counted by PCI address as the driver does).
class NicTopology {
 public:
  struct Cards {
    std::vector<std::string> preferred, others;
  };

  // What sysfs says of these cards, network interfaces or RDMA devices; of all RDMA devices if
  // none is named. A GPU prefers the cards that the fewest PCIe bridges part it from, on its own
  // node; a node those that are at it.
  static NicTopology discover(const std::vector<std::string>& cards = {},
                              const std::string& sysfs = "/sys");
  // {"cpu:0": [["preferred", ...], ["other", ...]], ...}. kInvalidArgument says where it is wrong.
  static Result<NicTopology> parse(const std::string& json);
  // From MC_CUSTOM_TOPO_JSON if that is set, else what discover() finds.
  static Result<NicTopology> load(const FabricEnv& env, const std::vector<std::string>& cards = {},
                                  const std::string& sysfs = "/sys");

  const std::map<std::string, Cards>& locations() const { return locations_; }
  // Preferred ones first; with kLocal no others, unless there are no preferred. A location that is
  // not known: all cards.
  std::vector<std::string> choose(const std::string& location, NicSelection selection) const;
  std::string json() const;

 private:
  std::map<std::string, Cards> locations_;
};

// Of the processor that this thread runs on: "cpu:0".
std::string locationOfThisThread();

}  // namespace mooncake
