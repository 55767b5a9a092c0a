#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "base/wait.h"
#include "engine/memory/region_table.h"

namespace mooncake::proxy {

constexpr uint32_t kMostRanks = 1024;
constexpr uint32_t kMostRegions = 64;
// A proxy reads all words of a peer at once.
constexpr uint32_t kMostSignalWords = 4096;

// A region of this rank that commands read.
struct LocalRegion {
  std::span<std::byte> memory;
  MemoryOwner owner;  // the device that owns it
};

// A region of a peer that commands write to.
struct TargetRegion {
  RemoteRegion remote;
  bool isOfDevice = false;
};

// The memory of one rank that commands of the other ranks may reach: regions, and words that count
// the commands that have arrived.
//
// Wire form: u32 version, u32 ranks, u32 signal words for each rank, three u64 of the region of the
// signals, u32 number of regions, three u64 and a bool of each.
struct Regions {
  static constexpr uint32_t kVersion = 1;

  uint32_t ranks = 0;
  uint32_t signalWords = 0;
  RemoteRegion signals;  // a doorbell, then the words that rank 0 counts up, then rank 1's, ...
  std::vector<TargetRegion> regions;

  // Where the words begin that `rank` counts up, in `signals`.
  uint64_t wordsOf(uint32_t rank) const {
    return sizeof(Doorbell) + uint64_t(rank) * signalWords * sizeof(uint64_t);
  }

  Bytes encode() const;
  // `from` names the sender in the error.
  static Result<Regions> decode(ByteView bytes, const std::string& from);
};

}  // namespace mooncake::proxy
