#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>

#include "base/fd.h"
#include "base/mutex.h"
#include "base/result.h"
#include "device/peer_memory.h"

namespace mooncake {

// Names memory that a process shares with other processes of its host. A restarted owner begins to
// number its allocations anew, in a later epoch: so no two allocations have the same name.
struct PeerAllocation {
  uint64_t owner = 0;   // the rank of the process that allocated it
  uint64_t epoch = 0;   // in which it was allocated
  uint64_t number = 0;  // among the owner's allocations
  uint64_t bytes = 0;

  std::string text() const;  // for errors
};

// Memory that a device of this process shares with other processes: allocations of its own, and
// mappings of theirs. Work of the device uses it without a count, and belongs to an epoch. So
// memory without users stays mapped until the epochs of its last work are drained. Calls may wait
// for the device. Thread-safe.
class PeerMappings {
 public:
  struct Settings {
    int device = 0;
    uint64_t owner = 0;  // the rank of this process
    size_t limit = 0;    // of the bytes of one owner that are mapped here: MOONCAKE_PEER_MEMORY
  };
  // `memory` outlives the object.
  PeerMappings(PeerMemory& memory, Settings settings) : memory_(memory), settings_(settings) {}
  // Unmaps all. No work that uses the memory may run.
  ~PeerMappings();
  PeerMappings(const PeerMappings&) = delete;
  PeerMappings& operator=(const PeerMappings&) = delete;

  struct Mapped {
    PeerAllocation allocation;  // `bytes` may be more than was asked for
    std::span<std::byte> memory;
  };
  // Allocates memory, which has one user. kExhausted: more than the limit, or than the device has.
  Result<Mapped> allocate(size_t bytes, uint64_t epoch);
  // Returns a descriptor of memory that this process allocated, for one that maps it.
  Result<Fd> descriptorOf(const PeerAllocation& allocation);

  // Brings the descriptor of an allocation from its owner.
  using Fetch = std::function<Result<Fd>()>;
  // Maps memory of another process, or counts one more user of a mapping that is there already.
  // `fetch` runs in the call if it is needed, and must not call this object. kExhausted: more than
  // the limit. kMismatch: the mapping that is there has another size.
  Result<Mapped> open(const PeerAllocation& allocation, const Fetch& fetch);

  // Ends one use of the memory. Work of epochs up to `lastEpoch` may still use it.
  Status release(const PeerAllocation& allocation, uint64_t lastEpoch);
  // The caller's word that no work of epochs up to `epoch` runs any more. Unmaps the memory without
  // users whose last work was in them.
  Status drained(uint64_t epoch);

  // Bytes of an owner's memory that are mapped here.
  size_t bytesOf(uint64_t owner) const;

 private:
  struct Key {
    uint64_t owner, epoch, number;
    auto operator<=>(const Key&) const = default;
  };
  struct Entry {
    std::span<std::byte> memory;
    Fd descriptor;  // of own memory only
    size_t users = 1;
    uint64_t lastEpoch = 0;  // of work that may use it, as far as users have told
  };
  using Entries = std::map<Key, Entry>;

  static Key keyOf(const PeerAllocation& allocation);
  Status checkLimit(uint64_t owner, size_t bytes) const REQUIRES(mutex_);
  size_t countBytes(uint64_t owner, bool onlyUnused) const REQUIRES(mutex_);
  Status unmap(Entries::iterator entry) REQUIRES(mutex_);

  PeerMemory& memory_;
  const Settings settings_;
  mutable Mutex mutex_;
  Entries entries_ GUARDED_BY(mutex_);
  uint64_t lastNumber_ GUARDED_BY(mutex_) = 0;
  uint64_t drained_ GUARDED_BY(mutex_) = 0;  // no work of epochs up to this one runs
};

}  // namespace mooncake
