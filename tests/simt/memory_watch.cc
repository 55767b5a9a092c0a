#include "tests/simt/memory_watch.h"

#include <algorithm>

namespace mooncake::simt {

void MemoryWatch::own(int rank, const void* begin, size_t bytes, MemoryOwner owner) {
  const auto* first = static_cast<const std::byte*>(begin);
  const auto at = std::ranges::upper_bound(regions_, first, {}, &Region::begin);
  regions_.insert(at, {first, first + bytes, rank, owner});
}

const MemoryWatch::Region* MemoryWatch::regionOf(const void* address) const {
  const auto* byte = static_cast<const std::byte*>(address);
  const auto after = std::ranges::upper_bound(regions_, byte, {}, &Region::begin);
  if (after == regions_.begin()) return nullptr;
  const Region& region = *(after - 1);
  return byte < region.end ? &region : nullptr;
}

void MemoryWatch::plain(int rank, const void* address, size_t bytes, Access access) {
  const Region* const region = regionOf(address);
  if (!region || region->owner == MemoryOwner::kHost) return;
  Traffic& traffic = traffic_[rank];
  const bool isHere = region->rank == rank;
  if (access == Access::kLoad) {
    (isHere ? traffic.bytesReadHere : traffic.bytesReadThere) += bytes;
  } else {
    (isHere ? traffic.bytesWrittenHere : traffic.bytesWrittenThere) += bytes;
  }
}

std::optional<std::string> MemoryWatch::atomic(int rank, const void* address, Access access,
                                               Scope scope) {
  if (const Region* const region = regionOf(address)) {
    Traffic& traffic = traffic_[rank];
    if (region->owner == MemoryOwner::kHost) {
      ++traffic.hostWords;
    } else if (region->rank != rank && access != Access::kLoad) {
      ++traffic.remoteStores;
    }
  }
  Word& word = words_.try_emplace(address, Word{rank}).first->second;
  word.isShared = word.isShared || word.firstRank != rank;
  word.narrowest = std::min(word.narrowest, scope);
  if (!word.isShared || word.narrowest == Scope::kSystem) return std::nullopt;
  return "scope: several ranks use this word, and not all with system scope";
}

}  // namespace mooncake::simt
