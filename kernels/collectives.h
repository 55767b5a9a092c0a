#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/elements.h"
#include "kernels/group_state.h"

// The arguments of the kernels for collectives. Addresses are the device's.
namespace mooncake::kernels {

// The ranks that read a rank's inputs. Ranks on other hosts get nothing else.
enum class Readers : uint32_t {
  kAll,      // of all inputs; one rank of each other host receives them for all ranks there
  kOwnPart,  // each rank its input, or its part of the only one: all parts are equal
  kRoot      // the root only
};

// What all collectives have in common; see exchange.cuh.
struct Exchange {
  GroupState* state;
  uint32_t call;        // a hash of the call, which must be equal on all ranks; kCallBits count
  uint64_t decisionNs;  // so long after it has stopped, a kernel gives up
  int root;             // if this rank is lost, the operation has no result; -1: any may be lost
  unsigned pieces;  // number of parts into which the data are cut, each with an exchange of its own
  size_t piece;     // bytes of each input in a piece; several pieces: a multiple of 16
  size_t bytes;     // of each input
  // Each piece takes two exchanges: in the first one, each rank reduces a segment of the piece; in
  // the second one, all ranks gather the segments. The same on all ranks, as are the pieces.
  bool isTwoShot;
  Readers readers;
  unsigned inputCount;  // this rank publishes its inputs one behind the other; 0: nothing
  const unsigned char* inputs[kMaxRanks];
  // With several pieces, results go to `scratch`, and to `output` when the operation cannot begin
  // anew any more: `output` may be the input, and keeps its contents without a result. Null: they
  // go to the outputs at once.
  unsigned char* scratch;
  unsigned char* output;
  bool isOfGraph;   // replays launch the kernel, and the host does not see them
  bool isHeld;      // the host may stop the group ahead of this operation, from another stream
  uint64_t skipNs;  // the host hears if ranks are so late, and may skip them; 0: it does not
};

// result[i] = input of rank 0 [i] op input of rank 1 [i] ..., for `bytes` at `offset` of the
// published piece: all_reduce with offset = 0, reduce_scatter with the rank's part, reduce with no
// bytes elsewhere. Two-shot: all_reduce only.
struct ReduceArguments {
  Exchange exchange;
  size_t offset;
  size_t bytes;  // of all pieces
  unsigned char* output;
  Combine by;
};

// Copies `bytes` at `offset` of the published pieces of each rank in `sources` to that rank's
// output: all_gather, gather, scatter, broadcast, all_to_all. Outputs of ranks that do not take
// part are filled with zeros.
struct MoveArguments {
  Exchange exchange;
  uint64_t sources;      // bits of ranks
  size_t offset, bytes;  // see ReduceArguments
  unsigned char* outputs[kMaxRanks];
};

struct AcknowledgeArguments {
  GroupState* state;
};

}  // namespace mooncake::kernels
