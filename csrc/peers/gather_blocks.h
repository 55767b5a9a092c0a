#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/deadline.h"
#include "base/result.h"
#include "collectives/collectives.h"
#include "group/group.h"

namespace mooncake {

inline uint64_t bitsOf(const std::vector<int>& ranks) {
  uint64_t bits = 0;
  for (const int rank : ranks) bits |= uint64_t(1) << rank;
  return bits;
}

// Members exchange blocks of one size. Returns them by rank. Blocks of members that were lost before
// stay as they are made. kPeerLost: a member has been lost since the group's last operation.
// Collective.
template <typename Block>
Result<std::vector<Block>> gatherBlocks(Group& group, const Block& mine, Deadline deadline) {
  std::vector<Block> blocks(size_t(group.size()));
  std::vector<Span> places;
  const auto before = group.lastView;
  for (Block& block : blocks) places.push_back(std::as_writable_bytes(std::span(&block, 1)));
  MOONCAKE_TRY(
      allgather(group, std::as_bytes(std::span(&mine, 1)), places, DType::kUInt8, deadline));
  if (before && before->active != group.lastView->active)
    return Error{ErrorCode::kPeerLost, "a member of the group has been lost meanwhile"};
  return blocks;
}

}  // namespace mooncake
