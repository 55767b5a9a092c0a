#pragma once

#include <memory>
#include <span>

#include <ATen/ATen.h>

#include "engine/engine.h"

// Tensors over memory that processes of a host share.
namespace mooncake {

// Allocates a zeroed tensor in the engine's arena, which the ranks of the host can map. The tensor
// may outlive the engine.
at::Tensor tensorInArena(Engine& engine, int64_t elements, const at::TensorOptions& options);
// Makes a tensor over a peer's memory, which `mapping` keeps mapped.
at::Tensor tensorOver(std::span<std::byte> memory, at::IntArrayRef shape, at::ScalarType type,
                      std::shared_ptr<const void> mapping);

}  // namespace mooncake
