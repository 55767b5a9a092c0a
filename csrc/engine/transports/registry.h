#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/transports/transport.h"

namespace mooncake {

// Every wire that is built in, best first. The order is the order in which routes are tried. One
// that is for tests is used only when it was asked for.
struct TransportEntry {
  const char* name;
  Result<std::unique_ptr<Transport>> (*create)(const TransportContext& context);
  bool isForTests = false;
};
const std::vector<TransportEntry>& transportRegistry();

}  // namespace mooncake
