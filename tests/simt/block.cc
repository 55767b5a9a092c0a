#include "tests/simt/block.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace mooncake::simt {

Block::Block(Launch& launch, unsigned number) : launch(launch) {
  const dim3 grid = launch.grid;
  index = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
  threads = std::vector<Thread>(launch.threads());
  warps = std::vector<Warp>((launch.threads() + 31) / 32);
  alive = launch.threads();
  if (launch.sharedBytes) dynamic_ = allocate(launch.sharedBytes, 16);
}

Block::~Block() {
  for (const Memory& memory : memory_) std::free(memory.data);
}

// Each object has memory of its own, so that the address sanitizer sees an overrun.
void* Block::allocate(size_t bytes, size_t alignment) {
  alignment = std::max<size_t>(alignment, 16);
  auto* const data = static_cast<std::byte*>(
      std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment));
  std::memset(data, 0xa5, bytes);
  memory_.push_back({data, bytes});
  return data;
}

void* Block::staticShared(const void* key, size_t bytes, size_t alignment) {
  void*& object = statics_[key];
  if (!object) object = allocate(bytes, alignment);
  return object;
}

bool Block::isShared(const void* address) const {
  const auto* const byte = static_cast<const std::byte*>(address);
  return std::ranges::any_of(memory_, [&](const Memory& memory) {
    return byte >= memory.data && byte < memory.data + memory.bytes;
  });
}

std::string Block::nameOf(const Thread& thread) const {
  const unsigned number = index.x + launch.grid.x * (index.y + launch.grid.y * index.z);
  return "rank " + std::to_string(launch.rank) + " block " + std::to_string(number) + " thread " +
         std::to_string(thread.index);
}

}  // namespace mooncake::simt
