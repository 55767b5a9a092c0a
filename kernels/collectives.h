#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/elements.h"
#include "kernels/group_state.h"

// The arguments of the kernels for collectives. Addresses are the device's.
namespace mooncake::kernels {

// What all collectives have in common; see exchange.cuh.
struct Exchange {
  GroupState* state;
  uint32_t call;        // a hash of the call, which must be equal on all ranks; kCallBits count
  uint64_t decisionNs;  // so long after it has stopped, a kernel gives up
  int root;             // if this rank is lost, the operation has no result; -1: any may be lost
  unsigned inputCount;  // this rank publishes its inputs one behind the other; 0: nothing
  size_t bytes;         // of each input; all together have at most the state's halfBytes
  const unsigned char* inputs[kMaxRanks];
};

// result[i] = input of rank 0 [first + i] op that of rank 1 ..., for `count` elements:
// all_reduce with first = 0, reduce_scatter with the rank's part, reduce with no elements elsewhere.
struct ReduceArguments {
  Exchange exchange;
  size_t first;  // element
  size_t count;  // elements
  unsigned char* output;
  Combine by;
};

// Copies `bytes` at `offset` of the input of each rank in `sources` to that rank's output:
// all_gather, gather, scatter, broadcast, all_to_all. Outputs of ranks that do not take part are
// filled with zeros.
struct MoveArguments {
  Exchange exchange;
  uint64_t sources;  // bits of ranks
  size_t offset, bytes;
  unsigned char* outputs[kMaxRanks];
};

struct AcknowledgeArguments {
  GroupState* state;
};

}  // namespace mooncake::kernels
