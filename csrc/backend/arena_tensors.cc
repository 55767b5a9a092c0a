#include "backend/arena_tensors.h"

#include <utility>

#include "backend/arguments.h"
#include "base/fork.h"

namespace mooncake {
namespace {

// Deleter of a tensor, which keeps `memory` until then. In a forked child it leaks the memory: the
// arenas are not mapped there, and their addresses and descriptors may have other owners.
template <typename Memory>
auto keeping(std::shared_ptr<Memory> memory) {
  return [memory = std::move(memory), generation = forkGeneration()](void*) {
    if (generation != forkGeneration()) new std::shared_ptr<Memory>(memory);
  };
}

struct OwnBlock {
  std::shared_ptr<Arena> arena;  // outlives the block
  ArenaBlock block;
};

}  // namespace

at::Tensor tensorInArena(Engine& engine, int64_t elements, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) {
    throwError({ErrorCode::kUnsupported, "allocate_tensor: memory on " + options.device().str() +
                                             " cannot be shared between ranks, memory on the CPU "
                                             "can"});
  }
  const auto type = c10::typeMetaToScalarType(options.dtype());
  size_t bytes = 0;
  if (elements < 0 || __builtin_mul_overflow(size_t(elements), at::elementSize(type), &bytes))
    refuse("allocate_tensor: the size " + std::to_string(elements) + " is negative or too large");
  auto own = std::make_shared<OwnBlock>();
  own->arena = engine.sharedArena();
  own->block = orThrow(engine.allocate(bytes));
  return at::from_blob(own->block.data(), {elements}, keeping(own),
                       at::TensorOptions(type).requires_grad(options.requires_grad()));
}

at::Tensor tensorOver(std::span<std::byte> memory, at::IntArrayRef shape, at::ScalarType type,
                      std::shared_ptr<const void> mapping) {
  return at::from_blob(memory.data(), shape, keeping(std::move(mapping)), at::TensorOptions(type));
}

}  // namespace mooncake
