#include "backend/named_group.h"

namespace mooncake {

NamedGroup::NamedGroup(c10::intrusive_ptr<c10d::Store> store,
                       const c10::intrusive_ptr<c10d::Backend>& backend,
                       const std::vector<c10::Device>& devices)
    : ProcessGroup(std::move(store), backend->getRank(), backend->getSize()),
      name_(backend->getBackendName()) {
  setDefaultBackend(BackendType::CUSTOM);
  for (const c10::Device& device : devices) setBackend(device.type(), BackendType::CUSTOM, backend);
}

c10::intrusive_ptr<c10d::ProcessGroup> NamedGroup::named(
    const c10::intrusive_ptr<ProcessGroup>& plain) {
  if (!plain) return nullptr;
  auto group = c10::make_intrusive<NamedGroup>(plain->getStore(), plain->getDefaultBackend(),
                                               plain->getDeviceTypes());
  group->setBoundDeviceId(plain->getBoundDeviceId());
  group->setGroupName(plain->getGroupName());
  group->setGroupDesc(plain->getGroupDesc());
  return group;
}

}  // namespace mooncake
