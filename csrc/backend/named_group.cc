#include "backend/named_group.h"

namespace mooncake {

NamedGroup::NamedGroup(c10::intrusive_ptr<c10d::Store> store,
                       const c10::intrusive_ptr<c10d::Backend>& backend,
                       const std::vector<c10::Device>& devices)
    : ProcessGroup(std::move(store), backend->getRank(), backend->getSize()),
      name_(backend->getBackendName()),
      ours_(dynamic_cast<const MooncakeBackend*>(backend.get())) {
  setDefaultBackend(BackendType::CUSTOM);
  for (const c10::Device& device : devices) setBackend(device.type(), BackendType::CUSTOM, backend);
}

}  // namespace mooncake
