#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace mooncake {

// Pieces of its input that an operation takes as they come.
struct InputCut {
  size_t pieceBytes = 0;           // of each part; 0: the input is not cut
  size_t parts = 1;                // equal parts of each input, or
  std::vector<int64_t> lengths{};  // the elements of each part
};

// `part`: of the given size on all ranks. Each input has `ofEach` of them, and all inputs of a rank
// `parts`.
InputCut cutPieces(const at::Tensor& part, size_t parts = 1, size_t ofEach = 1);
// Of a reduction. A factor is multiplied with the whole tensor, so that one is not cut.
InputCut cutReduction(const c10d::ReduceOp& op, const at::Tensor& part, size_t parts = 1,
                      size_t ofEach = 1);
// Of all_to_all. Each rank cuts its own input: one for each rank, or one with parts of these
// lengths, in elements.
InputCut cutParts(const std::vector<at::Tensor>& inputs, std::vector<int64_t> lengths = {});

}  // namespace mooncake
