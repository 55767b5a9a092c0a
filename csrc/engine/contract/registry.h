#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/contract/transport.h"

namespace mooncake {

// A wire that is built in. One that is only by name is used only if it was asked for.
struct TransportEntry {
  const char* name;
  Result<std::unique_ptr<Transport>> (*create)(const TransportContext& context);
  bool isOnlyByName = false;
};
// All wires, best first; routes are tried in this order. wires/registry.cc has the list, so that no
// file of engine/ knows a wire.
const std::vector<TransportEntry>& transportRegistry();

}  // namespace mooncake
