#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "tests/simt/calls.h"

namespace mooncake::simt {

enum class MemoryOwner : uint8_t { kDevice, kHost };

// Bytes and words that a rank's threads have touched.
struct Traffic {
  uint64_t bytesReadHere = 0;   // memory of the rank's own device
  uint64_t bytesReadThere = 0;  // of other ranks' devices
  uint64_t bytesWrittenHere = 0;
  uint64_t bytesWrittenThere = 0;
  uint64_t hostWords = 0;     // atomic accesses to host memory
  uint64_t remoteStores = 0;  // atomic stores and updates in other ranks' memory
  uint64_t barriers = 0;      // calls of __syncthreads by the block's first thread
};

// Knows which rank owns which memory, counts the bytes that ranks move, and checks the scopes of
// atomic accesses.
class MemoryWatch {
 public:
  void own(int rank, const void* begin, size_t bytes, MemoryOwner owner);
  // Counts a plain access. Memory without an owner, such as stacks, does not count.
  void plain(int rank, const void* address, size_t bytes, Access access);
  // Counts an atomic access. Returns an error's text if ranks share the word and not all use
  // system scope: on a GPU, others may never see a store of a narrower scope.
  std::optional<std::string> atomic(int rank, const void* address, Access access, Scope scope);

  Traffic& traffic(int rank) { return traffic_[rank]; }

 private:
  struct Region {
    const std::byte* begin;
    const std::byte* end;
    int rank;
    MemoryOwner owner;
  };
  struct Word {
    int firstRank;
    bool isShared = false;
    Scope narrowest = Scope::kSystem;
  };

  const Region* regionOf(const void* address) const;

  std::vector<Region> regions_;  // by address
  std::unordered_map<const void*, Word> words_;
  std::unordered_map<int, Traffic> traffic_;
};

}  // namespace mooncake::simt
