#pragma once

#include <cstddef>
#include <span>

#include "base/deadline.h"
#include "base/dtype.h"
#include "base/result.h"
#include "collectives/group.h"
#include "collectives/reduce_cpu.h"

// The verbs. Every member of the group calls the same verb with the same arguments, in the same
// order; what each costs and which paper it follows stands on top of its file. n is the number of
// ranks, s the bytes per rank.
namespace mooncake {

using ConstSpan = std::span<const std::byte>;
using Span = std::span<std::byte>;

Status barrier(Group& group, Deadline deadline);

// Every rank's data becomes the root's.
Status broadcast(Group& group, Span data, DType dtype, int root, Deadline deadline);

// Every rank's data becomes the reduction over all ranks, in rank order: the same bits everywhere.
Status allreduce(Group& group, Span data, Reduction reduction, Deadline deadline);
// The same, but only the root's data changes.
Status reduce(Group& group, Span data, Reduction reduction, int root, Deadline deadline);

// outputs[r] becomes rank r's input; all have the input's length. An output may be the input
// itself.
Status allgather(Group& group, ConstSpan input, std::span<const Span> outputs, DType dtype,
                 Deadline deadline);

// Input: n parts of the output's length, one for each rank. Output: the reduction of everybody's
// part for us.
Status reduceScatter(Group& group, ConstSpan input, Span output, Reduction reduction,
                     Deadline deadline);

// inputs[r] goes to rank r, outputs[r] comes from it; any lengths that fit pair by pair, also zero.
Status alltoall(Group& group, std::span<const ConstSpan> inputs, std::span<const Span> outputs,
                DType dtype, Deadline deadline);

}  // namespace mooncake
