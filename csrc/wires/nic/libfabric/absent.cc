#include "wires/nic/libfabric/cards.h"

// For a build without rdma/fabric.h.
namespace mooncake {
namespace {

Error isAbsent() {
  return Error{ErrorCode::kUnsupported,
               "this build has no libfabric: rdma/fabric.h was not found when it was made. Install "
               "libfabric-dev, or the EFA installer, and build again"};
}

}  // namespace

Result<std::string> describeLibfabric(const FabricEnv&) { return isAbsent(); }

Result<std::vector<LibfabricCard>> listLibfabricCards(const FabricEnv&) { return isAbsent(); }

Result<std::unique_ptr<Nic>> openLibfabricNic(const LibfabricCard&, const FabricEnv&,
                                              const MemoryPlaces&) {
  return isAbsent();
}

}  // namespace mooncake
