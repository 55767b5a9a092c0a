#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"
#include "base/result.h"

namespace mooncake {

struct Reduction {
  DType dtype = DType::kFloat32;
  ReduceKind kind = ReduceKind::kSum;
};

// kInvalidArgument: the type has no such reduction (any of fp8, the maximum of complex numbers, the
// average of booleans, the bits of floats).
Status checkReduction(Reduction reduction);

// target[i] = sources[0][i] op sources[1][i] op ..., always in this order, so every rank that
// reduces the same sources gets the same bits. float16 and bfloat16 are computed in float32 and
// rounded once. kAvg divides by the number of sources. NaN wins in kMin and kMax. Booleans: sum and
// max are "or", product and min are "and". kPremulSum is kSum, because every rank has multiplied
// before. The target may be one of the sources.
void reduceSources(Reduction reduction, std::byte* target,
                   std::span<const std::byte* const> sources, size_t count);

}  // namespace mooncake
