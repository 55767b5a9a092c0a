#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/transports/transport.h"

namespace mooncake {

// Every wire that is built in, best first. The order is the order in which routes are tried. One
// that is only by name is used when it was asked for, else never.
struct TransportEntry {
  const char* name;
  Result<std::unique_ptr<Transport>> (*create)(const TransportContext& context);
  bool isOnlyByName = false;
};
const std::vector<TransportEntry>& transportRegistry();

}  // namespace mooncake
