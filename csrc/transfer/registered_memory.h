#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "engine/memory/region_table.h"
#include "transfer/codes.h"
#include "transfer/segment_description.h"

namespace mooncake::transfer {

// Whoever transfers from or to it holds it.
struct RegisteredBuffer {
  MemoryRegion region;
  uint32_t rights = 0;
  std::string location;
  uint64_t order = 0;   // of registration
  bool isOurs = false;  // given by the engine itself, not by its user
  bool isWritable = true;
};

// Memory that the user has registered, by where it lies. Ranges do not overlap. Any thread.
class RegisteredMemory {
 public:
  // Registrations that a program may have, beside that of the pool of managed buffers. The other
  // entries of the region table are for transfers that register memory for their own time.
  static constexpr size_t kMost = size_t(64) << 10;

  explicit RegisteredMemory(RegionTable& regions) : regions_(regions) {}

  struct Options {
    std::string location = "*";
    bool isRemoteAccessible = true;
    bool isOurs = false;
  };
  // `why` is for the log, where the code is not kGood.
  Code add(uint64_t address, uint64_t bytes, Options options, std::string& why);
  // kBatchBusy while a transfer of our own reads or writes it. Waits for those of peers.
  Code remove(uint64_t address, std::string& why);

  // What holds the whole range; null: nothing does.
  std::shared_ptr<const RegisteredBuffer> find(uint64_t address, uint64_t bytes) const;
  // In the order of registration, what is the engine's own behind all others.
  std::vector<RemoteBuffer> list() const;
  // Grows with every change.
  uint64_t version() const;

 private:
  RegionTable& regions_;
  // One at a time registers: with network cards that may take seconds, and transfers go on.
  std::mutex addingMutex_;
  mutable std::shared_mutex mutex_;                                // guards all below
  std::map<uint64_t, std::shared_ptr<RegisteredBuffer>> buffers_;  // by address
  uint64_t version_ = 0;
};

}  // namespace mooncake::transfer
