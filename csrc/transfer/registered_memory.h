#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/memory/region_table.h"
#include "transfer/codes.h"
#include "transfer/segment_description.h"

namespace mooncake::transfer {

// A registration. A transfer from or to its memory holds a reference until it ends.
struct RegisteredBuffer {
  MemoryRegion region;
  uint32_t rights = 0;
  std::string location;
  uint64_t order = 0;   // of registration
  bool isOurs = false;  // allocated by the engine, not by the program
  bool isWritable = true;
  MemoryOwner owner;  // the device that owns the memory
};

// The memory that the program has registered, by address. Ranges do not overlap. Any thread.
class RegisteredMemory {
 public:
  // Registrations that a program may have, in addition to the pool of managed buffers. The other
  // entries of the region table are for transfers that register memory while they last.
  static constexpr size_t kMost = size_t(64) << 10;

  explicit RegisteredMemory(RegionTable& regions) : regions_(regions) {}

  struct Options {
    std::string location = "*";
    bool isRemoteAccessible = true;
    bool isOurs = false;
  };
  // Sets `why`, for the log, if the code is not kGood.
  Code add(uint64_t address, uint64_t bytes, Options options, std::string& why);
  // kBatchBusy while one of our own transfers uses the memory. Waits for transfers of peers.
  Code remove(uint64_t address, std::string& why);

  // Returns the registration that holds the whole range, or null.
  std::shared_ptr<const RegisteredBuffer> find(uint64_t address, uint64_t bytes) const;
  // The remotely accessible registrations, oldest first; the engine's own come last.
  std::vector<RemoteBuffer> list() const;
  // Increases with every change.
  uint64_t version() const;

 private:
  RegionTable& regions_;
  // Serializes add(). Registering with network cards may take seconds; transfers go on meanwhile.
  Mutex addingMutex_;
  std::set<Accelerator*> prepared_ GUARDED_BY(addingMutex_);  // have pinned memory for connections
  mutable SharedMutex mutex_;
  std::map<uint64_t, std::shared_ptr<RegisteredBuffer>> buffers_ GUARDED_BY(mutex_);  // by address
  uint64_t version_ GUARDED_BY(mutex_) = 0;
};

}  // namespace mooncake::transfer
