#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/contract/transport.h"

namespace mooncake {

// Every wire that is built in, best first; routes are tried in this order. A wire that is only by
// name is used only if it was asked for.
struct TransportEntry {
  const char* name;
  Result<std::unique_ptr<Transport>> (*create)(const TransportContext& context);
  bool isOnlyByName = false;
};
const std::vector<TransportEntry>& transportRegistry();

}  // namespace mooncake
