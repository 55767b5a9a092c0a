#include "backend/device/symmetric_allocator.h"

#ifdef MOONCAKE_HAS_SYMMETRIC_MEMORY

#include <utility>

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "backend/arguments.h"
#include "backend/device/accelerator_of.h"
#include "backend/device/device_backend.h"
#include "backend/errors.h"
#include "device/device_env.h"

namespace mooncake {
namespace {

constexpr size_t kAlignment = 256;

size_t alignedUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

DeviceBackend& backendOf(const std::string& groupName, const c10::Device& device) {
  const auto group = c10d::resolve_process_group(groupName);
  auto* const ours = dynamic_cast<DeviceBackend*>(group->getBackend(device.type()).get());
  if (!ours) {
    refuse("symmetric memory \"MOONCAKE\" needs the backend \"mooncake\" for devices of type " +
           c10::DeviceTypeName(device.type(), /*lower_case=*/true) + " in group '" + groupName +
           "'");
  }
  return *ours;
}

}  // namespace

c10::DeviceType SymmetricAllocator::supported_device_type() {
  const auto accelerator = at::getAccelerator(/*checked=*/false);
  return accelerator.value_or(c10::DeviceType::CUDA);
}

void* SymmetricAllocator::alloc(size_t size, int device_idx,
                                const std::optional<std::string>& /*group_name*/) {
  c10::Device device(supported_device_type(), c10::DeviceIndex(device_idx));
  if (device_idx < 0) device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  Accelerator& accelerator = *orThrow(acceleratorOf(device.type()));
  PeerMemory* const memory = accelerator.peerMemory();
  if (!memory) refuse(std::string(accelerator.name()) + " has no devices");
  throwIfError(memory->checkSharing(device.index()));
  const size_t limit = orThrow(DeviceEnv::read()).peerMemory;
  auto made = std::make_shared<SymmetricAllocation>(accelerator, device);
  made->bytes = size;
  made->padOffset = alignedUp(size);
  made->padBytes = c10d::symmetric_memory::get_signal_pad_size();
  const size_t bytes = made->padOffset + made->padBytes;
  std::lock_guard lock(state_.mutex);
  if (bytes > limit || state_.bytes > limit - bytes) {
    throwError({ErrorCode::kExhausted,
                std::to_string(bytes) + " bytes of symmetric memory beside " +
                    std::to_string(state_.bytes) + " are more than MOONCAKE_PEER_MEMORY allows"});
  }
  auto allocated = orThrow(memory->allocateShared(device.index(), bytes));
  made->memory = allocated.memory;
  made->shared = {.allocation = {.number = ++state_.lastNumber, .bytes = allocated.memory.size()},
                  .descriptor = std::move(allocated.descriptor)};
  const c10::DeviceGuard on(device);
  at::for_blob(made->memory.data() + made->padOffset, {int64_t(made->padBytes)})
      .options(at::TensorOptions(at::kByte).device(device))
      .target_device(device)
      .make_tensor()
      .zero_();
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  void* const data = made->memory.data();
  state_.bytes += made->memory.size();
  state_.entries.emplace(data, Entry{std::move(made), {}});
  return data;
}

void SymmetricAllocator::free(void* ptr) {
  if (c10d::symmetric_memory::is_finalizing()) return;
  Entry entry;  // ends without the lock, as it waits for the device
  std::lock_guard lock(state_.mutex);
  const auto found = state_.entries.find(ptr);
  if (found == state_.entries.end()) return;
  entry = std::move(found->second);
  state_.entries.erase(found);
  state_.bytes -= entry.allocation->memory.size();
}

std::shared_ptr<const SymmetricAllocation> SymmetricAllocator::find(void* ptr) {
  std::lock_guard lock(state_.mutex);
  const auto found = state_.entries.find(ptr);
  if (found == state_.entries.end())
    refuse("the tensor was not allocated as symmetric memory by \"MOONCAKE\"");
  return found->second.allocation;
}

bool SymmetricAllocator::has_allocation(void* ptr) {
  std::lock_guard lock(state_.mutex);
  return state_.entries.contains(ptr);
}

c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> SymmetricAllocator::rendezvous(
    void* ptr, const std::optional<std::string>& group_name) {
  if (!group_name) refuse("the rendezvous of symmetric memory needs the name of a group");
  const auto own = find(ptr);
  DeviceBackend& backend = backendOf(*group_name, own->device);
  const auto group = backend.peerSharing(own->device);
  {
    std::lock_guard lock(state_.mutex);
    const auto entry = state_.entries.find(ptr);
    if (entry != state_.entries.end()) {
      const auto made = entry->second.handles.find(group);
      if (made != entry->second.handles.end()) return made->second;
    }
  }
  auto handle = c10::make_intrusive<MappedSymmetricMemory>(group, own, backend.globalRanks());
  std::lock_guard lock(state_.mutex);
  const auto entry = state_.entries.find(ptr);
  if (entry != state_.entries.end()) entry->second.handles.emplace(group, handle);
  return handle;
}

void registerSymmetricMemory() {
  c10d::symmetric_memory::register_availability("MOONCAKE",
                                                c10::make_intrusive<SymmetricAllocator>());
}

}  // namespace mooncake

#endif
