#include "transfer/registered_memory.h"

#include <algorithm>

#include "device/cuda/driver_loaded.h"
#include "engine/memory/device_copies.h"
#include "engine/memory/program_memory.h"
#include "wires/nic/device_memory.h"

namespace mooncake::transfer {
namespace {

std::string describe(uint64_t address, uint64_t bytes) {
  char text[64];
  std::snprintf(text, sizeof text, "0x%llx (%llu bytes)", static_cast<unsigned long long>(address),
                static_cast<unsigned long long>(bytes));
  return text;
}

}  // namespace

Code RegisteredMemory::add(uint64_t address, uint64_t bytes, Options options, std::string& why) {
  if (address == 0 || bytes == 0 || address + bytes < address) {
    why = describe(address, bytes) + " is no range of memory";
    return kInvalid;
  }
  if (options.location.empty() || options.location.size() > kMostLocationBytes) {
    why = "a location is \"*\", \"cpu:0\" or \"cuda:0\"";
    return kInvalid;
  }
  Lock adding(addingMutex_);
  {
    SharedLock lock(mutex_);
    if (buffers_.size() > kMost) {
      why = "all " + std::to_string(kMost) + " registrations of this engine are in use. " +
            "Unregister memory, or register larger ranges";
      return kMemory;
    }
    const auto behind = buffers_.lower_bound(address + bytes);
    if (behind != buffers_.begin()) {
      const RemoteRegion before = std::prev(behind)->second->region.remote();
      if (before.address + before.bytes > address) {
        why = describe(address, bytes) + " overlaps " + describe(before.address, before.bytes) +
              ", which is registered";
        return kOverlap;
      }
    }
  }
  auto* const memory = reinterpret_cast<std::byte*>(address);
  MemoryOwner owner;
  Protection protection{true, true};
  if (!options.isOurs) {
    const auto found = ownerOf(memory, bytes);
    if (!found.ok()) {
      why = describe(address, bytes) + ": " + found.error().message;
      return kInvalid;
    }
    owner = *found;
    if (owner && prepared_.insert(owner.accelerator).second)
      DeviceCopies::prepare(*owner.accelerator);
    // The kernel's page protection does not cover memory of devices. A card may reach memory of a GPU
    // in a build without an accelerator for it, too.
    const bool isOfDevice = owner || (isCudaLoaded() && MemoryPlaces::real().of(memory).isCuda);
    if (!isOfDevice) protection = protectionOf(memory, bytes);
  }
  if (!protection.isReadable) {
    why = describe(address, bytes) + " is not mapped in this process, or must not be read";
    return kInvalid;
  }
  uint32_t rights = 0;
  if (options.isRemoteAccessible)
    rights = protection.isWritable ? kRemoteRead | kRemoteWrite : kRemoteRead;
  auto region = regions_.add(
      memory, bytes, rights | kLasting | (options.isOurs ? 0u : uint32_t(kOfProgram)), owner);
  if (!region.ok()) {
    why = region.error().message;
    return kMemory;
  }
  auto buffer = std::make_shared<RegisteredBuffer>();
  buffer->region = std::move(*region);
  buffer->rights = rights;
  buffer->location = std::move(options.location);
  buffer->isOurs = options.isOurs;
  buffer->isWritable = protection.isWritable;
  buffer->owner = owner;
  Guard lock(mutex_);
  buffer->order = ++version_;
  buffers_.emplace(address, std::move(buffer));
  return kGood;
}

Code RegisteredMemory::remove(uint64_t address, std::string& why) {
  std::shared_ptr<RegisteredBuffer> removed;  // destroyed without the lock: that may wait for peers
  Guard lock(mutex_);
  const auto found = buffers_.find(address);
  if (found == buffers_.end()) {
    why = "nothing is registered that begins at " + describe(address, 0);
    return kNotRegistered;
  }
  if (found->second.use_count() > 1) {
    why = "transfers are under way in the memory at " + describe(address, 0);
    return kBatchBusy;
  }
  removed = std::move(found->second);
  buffers_.erase(found);
  ++version_;
  return kGood;
}

std::shared_ptr<const RegisteredBuffer> RegisteredMemory::find(uint64_t address,
                                                               uint64_t bytes) const {
  SharedLock lock(mutex_);
  const auto behind = buffers_.upper_bound(address);
  if (behind == buffers_.begin()) return nullptr;
  const auto& buffer = std::prev(behind)->second;
  const RemoteRegion region = buffer->region.remote();
  const uint64_t offset = address - region.address;
  if (offset > region.bytes || bytes > region.bytes - offset) return nullptr;
  return buffer;
}

std::vector<RemoteBuffer> RegisteredMemory::list() const {
  SharedLock lock(mutex_);
  std::vector<const RegisteredBuffer*> all;
  for (const auto& [address, buffer] : buffers_) {
    if (buffer->rights != 0) all.push_back(buffer.get());
  }
  std::sort(all.begin(), all.end(), [](const auto* a, const auto* b) {
    return std::pair(a->isOurs, a->order) < std::pair(b->isOurs, b->order);
  });
  std::vector<RemoteBuffer> listed;
  for (const auto* buffer : all)
    listed.push_back({buffer->region.remote(), buffer->rights, buffer->location});
  return listed;
}

uint64_t RegisteredMemory::version() const {
  SharedLock lock(mutex_);
  return version_;
}

}  // namespace mooncake::transfer
