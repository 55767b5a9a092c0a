#include "device/graph_memory.h"

#include <algorithm>
#include <bit>
#include <string>

namespace mooncake {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kLeast = size_t{1} << 16;

}  // namespace

Result<std::span<std::byte>> GraphMemory::take(size_t bytes, Taken& taken) {
  const size_t rounded = (bytes + kLine - 1) / kLine * kLine;
  for (; taken.block < blocks_.size(); ++taken.block, taken.bytes = 0) {
    const auto block = blocks_[taken.block];
    if (rounded > block.size() - taken.bytes) continue;
    const auto piece = block.subspan(taken.bytes, bytes);
    taken.bytes += rounded;
    return piece;
  }
  auto block = grow(rounded);
  if (!block.ok()) return block.error();
  taken.bytes = rounded;
  return block->first(bytes);
}

Result<std::span<std::byte>> GraphMemory::grow(size_t bytes) {
  const size_t left = limit_ - allocated_;
  if (bytes > left) {
    return Error{ErrorCode::kExhausted,
                 "the operation needs " + std::to_string(bytes) +
                     " more bytes of pinned memory that stays with the graphs of the group, which "
                     "have " +
                     std::to_string(allocated_) + " of the " + std::to_string(limit_) +
                     " that MOONCAKE_GRAPH_MEMORY allows"};
  }
  const size_t last = blocks_.empty() ? kLeast / 2 : blocks_.back().size();
  const size_t wanted = std::max(std::bit_ceil(bytes), 2 * last);
  auto memory = accelerator_.allocatePinned(std::min(wanted, left));
  if (!memory.ok()) return memory.error();
  allocated_ += memory->size();
  blocks_.push_back(*memory);
  return *memory;
}

}  // namespace mooncake
