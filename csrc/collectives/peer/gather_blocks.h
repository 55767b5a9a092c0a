#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/deadline.h"
#include "base/result.h"
#include "collectives/collectives.h"
#include "group/group.h"

namespace mooncake {

// Members exchange blocks of one size. Returns them by rank. kPeerLost: a member has been lost.
// Collective.
template <typename Block>
Result<std::vector<Block>> gatherBlocks(Group& group, const Block& mine, Deadline deadline) {
  std::vector<Block> blocks(size_t(group.size()));
  std::vector<Span> places;
  for (Block& block : blocks) places.push_back(std::as_writable_bytes(std::span(&block, 1)));
  MOONCAKE_TRY(
      allgather(group, std::as_bytes(std::span(&mine, 1)), places, DType::kUInt8, deadline));
  if (int(group.lastView->active.size()) < group.size())
    return Error{ErrorCode::kPeerLost, "a member of the group has been lost meanwhile"};
  return blocks;
}

}  // namespace mooncake
