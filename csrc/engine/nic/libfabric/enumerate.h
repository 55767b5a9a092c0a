#pragma once

#include <memory>
#include <rdma/fabric.h>
#include <string>

#include "engine/nic/libfabric/library.h"

namespace mooncake {

using FabricInfo = std::shared_ptr<fi_info>;

// What we ask of any provider. `source`: an address of this host to be bound to, or empty.
// Null: it has nothing of the kind.
FabricInfo askProvider(const std::shared_ptr<const LibfabricLibrary>& library,
                       const std::string& provider, const std::string& source, bool deviceMemory);

}  // namespace mooncake
