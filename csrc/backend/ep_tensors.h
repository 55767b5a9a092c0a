#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "membership/rank_set.h"

// Checks and reads the tensors that callers give to dispatch and combine. A failed check throws
// ValueError before anything is sent.
namespace mooncake {

void requireTensor(const at::Tensor& tensor, const char* what, at::ScalarType dtype,
                   std::initializer_list<int64_t> sizes);  // -1: any size
// Returns topk_idx, [tokens][top-k] of int64 or int32, as int32: -1, or an expert below numExperts.
std::vector<int32_t> chosenExperts(const at::Tensor& topk, int64_t tokens, int numExperts);
// The ranks whose element among the first `size` is not 0.
GroupRanks maskOf(const at::Tensor& activeRanks, int size);
// Writes 0 for each of the first `size` ranks that is not a participant.
void clearOthers(const at::Tensor& activeRanks, int size, const GroupRanks& participants);

}  // namespace mooncake
