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
};

// What a rank called. Travels in the header of every operation, so that ranks that called different
// things all learn who called what. Wire format, 24 bytes.
struct Call {
  Verb verb = Verb::kBarrier;
  DType dtype = DType::kUInt8;
  ReduceKind reduce = ReduceKind::kSum;
  uint8_t fullyMapped = 0;  // which protocol the caller will follow, see operation.h
  int32_t root = -1;        // -1: the verb has none
  // Elements per rank; 0 for alltoall, whose splits are checked pair by pair. Of dispatch and
  // combine the channels of a token.
  uint64_t count : 48 = 0;
  // Calls that the rank has made since the last loss, modulo 2^16; 0 where they are not counted.
  // Ranks that go on with different operations after a loss differ in it.
  uint64_t sinceLoss : 16 = 0;
  // Of a call with several tensors, 0 of one with a single one: how many, and a hash of their types
  // and lengths. Of dispatch and combine the most tokens of a rank, and a hash of what else must be
  // the same; `root` is the number of experts.
  uint32_t tensors = 0;
  uint32_t lengths = 0;

  bool operator==(const Call&) const = default;
};
static_assert(sizeof(Call) == 24);

const char* verbName(Verb verb);  // torch.distributed's name: "all_reduce"

// "all_reduce(float32, 256 elements, SUM)". Decodes nothing blindly: unknown numbers print as
// numbers.
std::string describeCall(const Call& call);

}  // namespace mooncake
