#include "group/call.h"

#include <cstdio>

namespace mooncake {

const char* verbName(Verb verb) {
  switch (verb) {
    case Verb::kBarrier:
      return "barrier";
    case Verb::kBroadcast:
      return "broadcast";
    case Verb::kAllreduce:
      return "all_reduce";
    case Verb::kReduce:
      return "reduce";
    case Verb::kAllgather:
      return "all_gather";
    case Verb::kReduceScatter:
      return "reduce_scatter";
    case Verb::kAlltoall:
      return "all_to_all";
    case Verb::kGather:
      return "gather";
    case Verb::kScatter:
      return "scatter";
    case Verb::kRegisterWindow:
      return "window.tensor_register";
    case Verb::kDeregisterWindow:
      return "window.tensor_deregister";
    case Verb::kDispatch:
      return "dispatch";
    case Verb::kCombine:
      return "combine";
    case Verb::kMeetHosts:
      return "mooncake.ep.Buffer";
    case Verb::kCountTokens:
      return "dispatch's count of tokens";
  }
  return "unknown operation";
}

std::string describeCall(const Call& call) {
  std::string text = verbName(call.verb);
  if (call.verb == Verb::kBarrier || call.verb == Verb::kDeregisterWindow ||
      call.verb == Verb::kMeetHosts)
    return text + "()";
  text += std::string("(") + dtypeName(call.dtype);
  if (call.verb == Verb::kDispatch || call.verb == Verb::kCombine) {
    char which[16];
    std::snprintf(which, sizeof(which), "%08x", call.lengths);
    const bool hasFields = call.verb == Verb::kDispatch && call.dtype == DType::kUInt8;
    return text + (hasFields ? ", row bytes " : ", hidden ") + std::to_string(call.count) + ", " +
           std::to_string(call.root) + " experts, at most " + std::to_string(call.tensors) +
           " tokens per rank, options #" + which + ")";
  }
  if (call.verb != Verb::kAlltoall && call.verb != Verb::kRegisterWindow)
    text += ", " + std::to_string(call.count) + " elements per rank";
  if (call.tensors > 0) {
    char which[16];
    std::snprintf(which, sizeof(which), "%08x", call.lengths);
    text +=
        std::string(" in ") + std::to_string(call.tensors) + " tensors of the lengths #" + which;
  }
  const bool reduces = call.verb == Verb::kAllreduce || call.verb == Verb::kReduce ||
                       call.verb == Verb::kReduceScatter;
  if (reduces) text += std::string(", ") + reduceName(call.reduce);
  if (call.root >= 0) text += ", root " + std::to_string(call.root);
  return text + ")";
}

}  // namespace mooncake
