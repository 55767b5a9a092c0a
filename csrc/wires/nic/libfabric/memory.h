#pragma once

#include <memory>
#include <set>

#include "base/mutex.h"
#include "wires/nic/device_memory.h"
#include "wires/nic/libfabric/endpoint.h"
#include "wires/nic/nic.h"

namespace mooncake {

// The registrations of one card. Each ends with its owner or with the card, whichever comes first.
class LibfabricMemories : public std::enable_shared_from_this<LibfabricMemories> {
 public:
  LibfabricMemories(LibfabricEndpoint& endpoint, const MemoryPlaces& places)
      : endpoint_(endpoint), places_(places) {}

  Result<std::unique_ptr<NicMemory>> add(std::span<std::byte> memory, uint32_t access);
  void closeAll();

  // Returns the provider's descriptor for memory that one of our operations names.
  static void* descriptorOf(const NicMemory& memory);

 private:
  class Memory;
  Result<fid_mr*> make(std::span<std::byte> memory, uint32_t access, NicMemoryPlace place);
  uint64_t randomKey() const;

  LibfabricEndpoint& endpoint_;
  const MemoryPlaces& places_;
  Mutex mutex_;
  std::set<fid_mr*> open_ GUARDED_BY(mutex_);
  bool isClosed_ GUARDED_BY(mutex_) = false;
};

}  // namespace mooncake
