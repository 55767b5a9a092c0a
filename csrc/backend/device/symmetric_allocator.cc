#include "backend/device/symmetric_allocator.h"

#ifdef MOONCAKE_HAS_SYMMETRIC_MEMORY

#include <chrono>
#include <thread>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "backend/arguments.h"
#include "backend/device/accelerator_of.h"
#include "backend/device/own_stream.h"
#include "backend/errors.h"
#include "backend/mooncake_backend.h"
#include "device/device_env.h"

namespace mooncake {
namespace {

constexpr size_t kAlignment = 256;
constexpr auto kPatience = std::chrono::seconds(10);  // with streams that use freed memory
constexpr auto kLook = std::chrono::milliseconds(1);

size_t alignedUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

constexpr const char* kForeign = "the tensor was not allocated as symmetric memory by \"MOONCAKE\"";

c10::DeviceType deviceType() {
  return at::getAccelerator(/*checked=*/false).value_or(c10::DeviceType::CUDA);
}

c10::Device currentDevice() { return c10::impl::VirtualGuardImpl(deviceType()).getDevice(); }

// On a stream that moves: other work of the device may wait for a rank that waits for this one.
void clearPad(const SymmetricAllocation& allocation) {
  const c10::DeviceGuard device(allocation.device);
  const DeviceStream prompt =
      orThrow(allocation.accelerator.streamQueues(allocation.device.index()))->prompt();
  const c10::StreamGuard current(OwnStream::named(allocation.device, prompt));
  at::for_blob(allocation.memory.data() + allocation.padOffset, {int64_t(allocation.padBytes)})
      .options(at::TensorOptions(at::kByte).device(allocation.device))
      .target_device(allocation.device)
      .make_tensor()
      .zero_();
  throwIfError(allocation.accelerator.synchronize(prompt));
}

MooncakeBackend& backendOf(const std::string& groupName, const c10::Device& device) {
  const auto group = c10d::resolve_process_group(groupName);
  auto* const ours = dynamic_cast<MooncakeBackend*>(group->getBackend(device.type()).get());
  if (!ours) {
    refuse("symmetric memory \"MOONCAKE\" needs the backend \"mooncake\" for devices of type " +
           c10::DeviceTypeName(device.type(), /*lower_case=*/true) + " in group '" + groupName +
           "'");
  }
  return *ours;
}

}  // namespace

c10::DeviceType SymmetricAllocator::supported_device_type() { return deviceType(); }

void* SymmetricAllocator::alloc(size_t size, int device_idx,
                                const std::optional<std::string>& /*group_name*/) {
  c10::Device device(supported_device_type(), c10::DeviceIndex(device_idx));
  if (device_idx < 0) device = currentDevice();
  void* data = nullptr;
  unlocked_([&] { data = allocate(size, device); });
  return data;
}

void* SymmetricAllocator::allocate(size_t size, c10::Device device) {
  Accelerator& accelerator = *orThrow(acceleratorOf(device.type()));
  PeerMemory* const memory = accelerator.peerMemory();
  if (!memory) refuse(std::string(accelerator.name()) + " has no devices");
  throwIfError(memory->checkSharing(device.index()));
  auto made = std::make_shared<SymmetricAllocation>(accelerator, device);
  made->bytes = size;
  made->padOffset = alignedUp(size);
  made->padBytes = c10d::symmetric_memory::get_signal_pad_size();
  made->total = state_.bytes;
  made->ends = state_.ends;
  auto allocated = share(*memory, device.index(), made->padOffset + made->padBytes);
  made->memory = allocated.memory;
  *state_.bytes += made->memory.size();
  made->shared = {.allocation = {.bytes = made->memory.size()},
                  .descriptor = std::move(allocated.descriptor)};
  made->useCurrentStream();
  clearPad(*made);
  Lock lock(state_.mutex);
  made->shared.allocation.number = ++state_.lastNumber;
  void* const data = made->memory.data();
  state_.entries.emplace(data, Entry{std::move(made), {}});
  return data;
}

// Memory that was freed may still be mapped, as streams use it. Where there is no room without it, the
// call waits for these streams.
PeerMemory::Allocation SymmetricAllocator::share(PeerMemory& memory, int device, size_t bytes) {
  const size_t limit = orThrow(DeviceEnv::read()).peerMemory;
  for (const auto deadline = Deadline::after(kPatience);;) {
    state_.ends->runDue();
    const size_t held = *state_.bytes;
    auto made = bytes <= limit && held <= limit - bytes
                    ? memory.allocateShared(device, bytes)
                    : Result<PeerMemory::Allocation>(Error{
                          ErrorCode::kExhausted,
                          std::to_string(bytes) + " bytes of symmetric memory beside " +
                              std::to_string(held) + " are more than MOONCAKE_PEER_MEMORY allows"});
    const bool mayGetRoom = made.status().code() == ErrorCode::kExhausted && bytes <= limit &&
                            state_.ends->waiting() > 0 && !deadline.passed();
    if (!mayGetRoom) return orThrow(std::move(made));
    std::this_thread::sleep_for(kLook);
  }
}

void SymmetricAllocator::free(void* ptr) {
  // In a forked child the memory is the parent's, and a thread of the parent may have had the lock.
  if (c10d::symmetric_memory::is_finalizing() || state_.generation != forkGeneration()) return;
  unlocked_([&] {
    Entry entry;  // ends without the lock
    Lock lock(state_.mutex);
    const auto found = state_.entries.find(ptr);
    if (found == state_.entries.end()) return;
    entry = std::move(found->second);
    state_.entries.erase(found);
  });
}

size_t SymmetricAllocator::get_alloc_size(void* ptr) {
  const Entry entry = find(ptr);
  if (!entry.allocation) refuse(kForeign);
  return entry.allocation->bytes;
}

// Without an allocation: it is none of ours.
SymmetricAllocator::Entry SymmetricAllocator::find(void* ptr) {
  Lock lock(state_.mutex);
  const auto found = state_.entries.find(ptr);
  return found == state_.entries.end() ? Entry() : found->second;
}

bool SymmetricAllocator::has_allocation(void* ptr) {
  Lock lock(state_.mutex);
  return state_.entries.contains(ptr);
}

c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> SymmetricAllocator::rendezvous(
    void* ptr, const std::optional<std::string>& group_name) {
  if (!group_name) refuse("the rendezvous of symmetric memory needs the name of a group");
  Handle handle;
  unlocked_([&] { handle = meet(ptr, *group_name); });
  return handle;
}

SymmetricAllocator::Handle SymmetricAllocator::meet(void* ptr, const std::string& groupName) {
  state_.ends->runDue();
  const Entry entry = find(ptr);
  const auto& own = entry.allocation;
  MooncakeBackend& backend = backendOf(groupName, own ? own->device : currentDevice());
  const auto group = backend.devices().sharing(own ? own->device : currentDevice());
  const auto known = entry.handles.find(group);
  // A rank with an error meets the other ranks, which would wait for it.
  Result<PeerSharing::Offer> offer = Error{ErrorCode::kInvalidArgument, kForeign};
  if (own && own->device.index() != group->device()) {
    offer = Error{ErrorCode::kInvalidArgument, "the group shares memory of device " +
                                                   std::to_string(group->device()) +
                                                   ", and the tensor is on " + own->device.str()};
  } else if (own) {
    offer = PeerSharing::Offer{.allocation = &own->shared,
                               .memory = own->memory,
                               .layout = {own->bytes, own->padOffset, own->padBytes},
                               .isKnown = known != entry.handles.end()};
  }
  auto mapped = orThrow(group->mapAll(offer));
  if (mapped.empty()) return known->second;
  auto handle = c10::make_intrusive<MappedSymmetricMemory>(group, own, std::move(mapped),
                                                           backend.group().options().globalRanks);
  Handle replaced;  // ends without the lock
  Lock lock(state_.mutex);
  const auto found = state_.entries.find(ptr);
  if (found != state_.entries.end() && found->second.allocation == own)
    replaced = std::exchange(found->second.handles[group], handle);
  return handle;
}

void registerSymmetricMemory(std::function<void(const std::function<void()>&)> unlocked) {
  c10d::symmetric_memory::register_availability(
      "MOONCAKE", c10::make_intrusive<SymmetricAllocator>(std::move(unlocked)));
}

}  // namespace mooncake

#endif
