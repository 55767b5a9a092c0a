#include "device/peer_mappings.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <utility>

#include "base/log.h"

namespace mooncake {
namespace {

Error unknown(const PeerAllocation& allocation) {
  return {ErrorCode::kInvalidArgument, allocation.text() + " is not mapped here"};
}

}  // namespace

std::string PeerAllocation::text() const {
  return "memory " + std::to_string(number) + " of rank " + std::to_string(owner) + " (epoch " +
         std::to_string(epoch) + ", " + std::to_string(bytes) + " bytes)";
}

PeerMappings::Key PeerMappings::keyOf(const PeerAllocation& allocation) {
  return {.owner = allocation.owner, .epoch = allocation.epoch, .number = allocation.number};
}

PeerMappings::~PeerMappings() {
  while (!entries_.empty()) {
    const Status gone = unmap(entries_.begin());
    if (!gone.ok()) log(LogLevel::kWarning, "device", gone.error().message);
  }
}

size_t PeerMappings::countBytes(uint64_t owner, bool onlyUnused) const {
  size_t bytes = 0;
  for (const auto& [key, entry] : entries_)
    if (key.owner == owner && (entry.users == 0 || !onlyUnused)) bytes += entry.memory.size();
  return bytes;
}

size_t PeerMappings::bytesOf(uint64_t owner) const {
  Lock lock(mutex_);
  return countBytes(owner, false);
}

Status PeerMappings::checkLimit(uint64_t owner, size_t bytes) const {
  const size_t used = countBytes(owner, false);
  if (bytes <= settings_.limit && used <= settings_.limit - bytes) return {};
  return {ErrorCode::kExhausted,
          "device " + std::to_string(settings_.device) + " is to map " + std::to_string(bytes) +
              " more bytes of rank " + std::to_string(owner) + ", and maps " +
              std::to_string(used) + " of it, of which " + std::to_string(countBytes(owner, true)) +
              " wait for work that may still use them. The limit is MOONCAKE_PEER_MEMORY=" +
              std::to_string(settings_.limit) + ": raise it, or use smaller buffers"};
}

Result<PeerMappings::Mapped> PeerMappings::allocate(size_t bytes, uint64_t epoch) {
  Lock lock(mutex_);
  MOONCAKE_TRY(checkLimit(settings_.owner, bytes));
  auto made = memory_.allocateShared(settings_.device, bytes);
  if (!made.ok()) return made.error();
  const PeerAllocation allocation{.owner = settings_.owner,
                                  .epoch = epoch,
                                  .number = ++lastNumber_,
                                  .bytes = made->memory.size()};
  entries_[keyOf(allocation)] = {.memory = made->memory, .descriptor = std::move(made->descriptor)};
  return Mapped{.allocation = allocation, .memory = made->memory};
}

Result<Fd> PeerMappings::descriptorOf(const PeerAllocation& allocation) {
  Lock lock(mutex_);
  const auto found = entries_.find(keyOf(allocation));
  if (found == entries_.end() || !found->second.descriptor) return unknown(allocation);
  Fd copy(::fcntl(found->second.descriptor.get(), F_DUPFD_CLOEXEC, 0));
  if (!copy) return systemError("fcntl(F_DUPFD_CLOEXEC)", errno);
  return copy;
}

Result<PeerMappings::Mapped> PeerMappings::open(const PeerAllocation& allocation,
                                                const Fetch& fetch) {
  Lock lock(mutex_);
  if (const auto found = entries_.find(keyOf(allocation)); found != entries_.end()) {
    Entry& entry = found->second;
    if (entry.memory.size() != allocation.bytes) {
      return Error{ErrorCode::kMismatch, allocation.text() + " is mapped here with " +
                                             std::to_string(entry.memory.size()) + " bytes"};
    }
    ++entry.users;
    return Mapped{.allocation = allocation, .memory = entry.memory};
  }
  MOONCAKE_TRY(checkLimit(allocation.owner, allocation.bytes));
  const auto descriptor = fetch();
  if (!descriptor.ok()) return descriptor.error();
  const auto mapped = memory_.mapShared(*descriptor, allocation.bytes, settings_.device);
  if (!mapped.ok()) {
    return Error{mapped.error().code, allocation.text() + " cannot be mapped for device " +
                                          std::to_string(settings_.device) + ": " +
                                          mapped.error().message};
  }
  entries_[keyOf(allocation)] = {.memory = *mapped};
  return Mapped{.allocation = allocation, .memory = *mapped};
}

Status PeerMappings::release(const PeerAllocation& allocation, uint64_t lastEpoch) {
  Lock lock(mutex_);
  const auto found = entries_.find(keyOf(allocation));
  if (found == entries_.end() || found->second.users == 0) return unknown(allocation);
  Entry& entry = found->second;
  entry.lastEpoch = std::max(entry.lastEpoch, lastEpoch);
  if (--entry.users != 0 || entry.lastEpoch > drained_) return {};
  return unmap(found);
}

Status PeerMappings::drained(uint64_t epoch) {
  Lock lock(mutex_);
  drained_ = std::max(drained_, epoch);
  Status first;
  for (auto at = entries_.begin(); at != entries_.end();) {
    const auto entry = at++;
    if (entry->second.users != 0 || entry->second.lastEpoch > drained_) continue;
    const Status gone = unmap(entry);
    if (first.ok()) first = gone;
  }
  return first;
}

// An entry whose memory cannot be unmapped goes as well: its device is lost.
Status PeerMappings::unmap(Entries::iterator entry) {
  const Status gone = memory_.unmapShared(entry->second.memory);
  entries_.erase(entry);
  return gone;
}

}  // namespace mooncake
