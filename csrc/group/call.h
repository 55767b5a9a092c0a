#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/dtype.h"

namespace mooncake {

enum class Verb : uint8_t {
  kBarrier = 1,
  kBroadcast,
  kAllreduce,
  kReduce,
  kAllgather,
  kReduceScatter,
  kAlltoall,
  kGather,
  kScatter,
  kRegisterWindow,
  kDeregisterWindow,
  kDispatch,
  kCombine,
  kMeetHosts,
  kCountTokens,
};
// In torch.distributed, in the order of Verb.
constexpr const char* kVerbNames[] = {"barrier",
                                      "broadcast",
                                      "all_reduce",
                                      "reduce",
                                      "all_gather",
                                      "reduce_scatter",
                                      "all_to_all",
                                      "gather",
                                      "scatter",
                                      "window.tensor_register",
                                      "window.tensor_deregister",
                                      "dispatch",
                                      "combine",
                                      "mooncake.ep.Buffer",
                                      "dispatch's count of tokens"};

// Where a rank called an operation. Callbacks count if they are of futures of the group's own
// operations. The order between their calls and the program's is the same on all ranks only if the
// program waits for the callbacks.
enum class CalledFrom : uint8_t {
  kProgram,          // while no callback was attached that had not ended
  kCallback,         // a callback
  kBesideCallbacks,  // the program, while there was one
};

// The call that a rank made. It travels in the header of every operation: if the calls of ranks
// differ, every rank can name them all. Wire format, 24 bytes.
struct Call {
  Verb verb = Verb::kBarrier;
  DType dtype = DType::kUInt8;
  ReduceKind reduce = ReduceKind::kSum;
  uint8_t fullyMapped : 1 = 0;  // which protocol the caller will follow, see operation.h
  // Further operations of the same call follow this one, if it ends well. Then no series closes
  // behind it (group/renewal.h).
  uint8_t goesOn : 1 = 0;
  uint8_t isBeyond : 1 = 0;  // the caller is none of the first ranks, see `root` and `tensors`
  // -1: the verb has none. all_gather and reduce_scatter: the number of ranks, from 0 on, for which
  // the buffers have parts; -1: for all. The call fails if a rank beyond them takes part.
  int32_t root = -1;
  // Elements per rank. 0 for alltoall: its splits are checked pair by pair. Dispatch and combine:
  // channels of a token, or bytes of its row.
  uint64_t count : 46 = 0;
  uint64_t from : 2 = 0;  // a CalledFrom
  // Number of calls that the rank has made since the last loss, modulo 2^16; 0: not counted. It
  // differs between ranks that go on with different operations after a loss.
  uint64_t sinceLoss : 16 = 0;
  // Number of tensors, and a hash of their types and lengths; both 0 if the call has one tensor.
  // Gather and scatter: the number of ranks, from 0 on, for which the root has parts; 0: for all.
  // Dispatch and combine: most tokens of a rank, and a hash of the other options that must be the
  // same on all ranks; `root` is the number of experts.
  uint32_t tensors = 0;
  uint32_t lengths = 0;

  bool operator==(const Call&) const = default;
};
static_assert(sizeof(Call) == 24);

const char* verbName(Verb verb);  // "all_reduce"

// "all_reduce(float32, 256 elements, SUM)". Unknown numbers print as numbers.
std::string describeCall(const Call& call);

}  // namespace mooncake
