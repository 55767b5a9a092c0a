#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "membership/rank_set.h"

// The tensors that callers of dispatch and combine give. Every check throws ValueError (TypeError
// for the wrong type) before anything is sent.
namespace mooncake {

void requireTensor(const at::Tensor& tensor, const char* what, at::ScalarType dtype,
                   std::initializer_list<int64_t> sizes);  // -1: any size
// [tokens][top-k] of int64 or int32, as 32 bits: -1, or below numExperts.
std::vector<int32_t> chosenExperts(const at::Tensor& topk, int64_t tokens, int numExperts);
// Of the first `size` elements those that are not 0.
RankSet maskOf(const at::Tensor& activeRanks, int size);
// Writes 0 for each of the first `size` ranks that is in none of them.
void clearOthers(const at::Tensor& activeRanks, int size, const RankSet& participants);

}  // namespace mooncake
