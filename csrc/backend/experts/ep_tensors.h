#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/block_cache.h"
#include "base/result.h"
#include "membership/rank_set.h"

// Checks and reads the tensors that callers give to dispatch and combine. The functions that begin
// with `require` look at no values, take tensors of any device, and throw ValueError. The other
// functions take tensors in host memory that were checked.
namespace mooncake {

// Returns the dtype's name in Python.
std::string nameOf(at::ScalarType type);
// Refuses a tensor that is neither the CPU's nor of a device whose tensors can be copied.
void requireDevice(const at::Tensor& tensor, const char* what);
// `device`: the one that all tensors of the call are on.
void requireTensor(const at::Tensor& tensor, const char* what, const c10::Device& device,
                   at::ScalarType dtype, std::initializer_list<int64_t> sizes);  // -1: any size
// topk_idx: [tokens][top-k] of int64 or int32.
void requireChoices(const at::Tensor& topk, const c10::Device& device, int64_t tokens);
void requireMask(const at::Tensor& activeRanks, const c10::Device& device, int size);

// Returns topk_idx as int32: -1, or an expert below numExperts. kInvalidArgument: there are other
// numbers.
Result<std::vector<int32_t>> chosenExperts(const at::Tensor& topk, int numExperts);
// The ranks whose element among the first `size` is not 0.
GroupRanks maskOf(const at::Tensor& activeRanks, int size);
// Writes 0 for each of the first `size` ranks that is not a participant.
void clearOthers(const at::Tensor& activeRanks, int size, const GroupRanks& participants);

// A tensor of the CPU, not initialised. A large one has a block of the cache.
at::Tensor newResult(BlockCache& cache, at::IntArrayRef sizes, at::ScalarType dtype);

}  // namespace mooncake
