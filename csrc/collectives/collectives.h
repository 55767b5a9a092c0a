#pragma once

#include <chrono>
#include <cstddef>
#include <span>

#include "base/deadline.h"
#include "base/dtype.h"
#include "base/result.h"
#include "collectives/input_feed.h"
#include "collectives/reduce_cpu.h"
#include "group/barrier.h"
#include "group/group.h"

// The verbs. Every member of the group calls the same verb with the same arguments, in the same
// order. The top of each verb's file has its cost and the paper that it follows. n is the number of
// ranks, s the bytes per rank.
namespace mooncake {

using ConstSpan = std::span<const std::byte>;
using Span = std::span<std::byte>;

// One of the tensors of a call that takes several: they go as one operation.
struct Buffer {
  Span data;
  DType dtype = DType::kFloat32;
  // Nonzero if the caller has put several tensors together, or has reordered a list: a hash of
  // their lengths and places, which must be the same on all ranks.
  uint32_t lengths = 0;
};
using Buffers = std::span<const Buffer>;

// A barrier (group/barrier.h) with an error that names the first late rank, or all of them.
Status monitoredBarrier(Group& group, bool namesAll, std::chrono::milliseconds timeout);

// With a feed, an operation takes its input as it comes: on all ranks or none, but for alltoall.
// After a call that failed, its output is undefined, and so is the data of a reduction in place.

// Every rank's data becomes a copy of the root's.
Status broadcast(Group& group, Span data, DType dtype, int root, Deadline deadline,
                 InputFeed* feed = nullptr);

// Every rank's data becomes the reduction over all ranks, in rank order: the same bits everywhere.
Status allreduce(Group& group, Span data, Reduction reduction, Deadline deadline,
                 InputFeed* feed = nullptr);
Status allreduce(Group& group, Buffers buffers, ReduceKind kind, Deadline deadline);
// The same, but only the root's data changes.
Status reduce(Group& group, Span data, Reduction reduction, int root, Deadline deadline,
              InputFeed* feed = nullptr);

// outputs[r] becomes rank r's input; all have the input's length. An output may be the input
// itself.
Status allgather(Group& group, ConstSpan input, std::span<const Span> outputs, DType dtype,
                 Deadline deadline, InputFeed* feed = nullptr);
// outputs[r * inputs.size() + i] becomes rank r's inputs[i].
// There may be outputs for the first ranks only. If a rank beyond them takes part, the call fails.
Status allgather(Group& group, Buffers inputs, std::span<const Span> outputs, Deadline deadline);
// Most bytes of that many inputs, packed, that are exchanged in slots. The limit is higher for a
// list than for a single input. To be fetched, the short inputs of a list are copied together and
// apart again; so slots cost no further copy and save a round of signals.
size_t mostGatheredInSlots(const Group& group, size_t inputs);

// The root's outputs[r] becomes rank r's input; the other ranks have no outputs. `parts`: all ranks
// say for how many ranks there are outputs, the first ones; 0: for all. If a rank beyond them takes
// part, the call fails.
Status gather(Group& group, ConstSpan input, std::span<const Span> outputs, DType dtype, int root,
              Deadline deadline, InputFeed* feed = nullptr, size_t parts = 0);

// Output becomes the root's inputs[rank]; the other ranks have no inputs. All have the same length.
// `parts`: as in gather().
Status scatter(Group& group, std::span<const ConstSpan> inputs, Span output, DType dtype, int root,
               Deadline deadline, InputFeed* feed = nullptr, size_t parts = 0);

// Input: n parts of the output's length, one for each rank. Output: the reduction of all ranks'
// parts for this rank. There may be parts for the first ranks only, as in allgather().
Status reduceScatter(Group& group, ConstSpan input, Span output, Reduction reduction,
                     Deadline deadline, InputFeed* feed = nullptr);
// Inputs: one such input for each output, or n for each output, which are its parts. A feed is for
// one output.
Status reduceScatter(Group& group, Buffers inputs, Buffers outputs, ReduceKind kind,
                     Deadline deadline, InputFeed* feed = nullptr);

// inputs[r] goes to rank r, outputs[r] comes from it; any lengths that fit pair by pair, also zero.
// There may be inputs and outputs for the first ranks only: the other ones have none.
Status alltoall(Group& group, std::span<const ConstSpan> inputs, std::span<const Span> outputs,
                DType dtype, Deadline deadline, InputFeed* feed = nullptr);

}  // namespace mooncake
