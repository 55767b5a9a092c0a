#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/experts/ep_normal.h"

// The calls of the normal mode by kernels, see EpNormal. Rows stay on their device, and the host
// waits for nothing.
namespace mooncake {

// Refuses tokens that kernels do not take.
void requireFewRanks(int64_t width);
// `fields`: the given ones, contiguous. `route`: has the sizes and the ranks that take part, if none
// is lost meanwhile; the result has the rest. `capacity`: rows that this rank has places for.
EpNormal::Arrived dispatchByKernels(EpBuffer& ours, const EpNormal::Dispatch& given,
                                    std::vector<at::Tensor> fields, EpRoute route,
                                    const EpNormal::Bound& most, size_t capacity, uint32_t agreed);
EpNormal::Arrived againByKernels(EpBuffer& ours, const EpNormal::Dispatch& given,
                                 const std::vector<at::Tensor>& fields);
// `made`: receives the results.
void combineByKernels(EpBuffer& ours, const EpNormal::Combine& given, EpNormal::Combined& made);

}  // namespace mooncake
