#pragma once

#include <memory>
#include <rdma/fabric.h>
#include <string>

#include "wires/nic/libfabric/library.h"

namespace mooncake {

using FabricInfo = std::shared_ptr<fi_info>;

// Asks a provider for cards that meet our requirements. `source`: an address of this host to bind
// to, or empty. Null: the provider has none.
FabricInfo askProvider(const std::shared_ptr<const LibfabricLibrary>& library,
                       const std::string& provider, const std::string& source, bool deviceMemory);

}  // namespace mooncake
