#include "group/call.h"

#include <cstddef>
#include <cstdio>
#include <iterator>

namespace mooncake {

const char* verbName(Verb verb) {
  const size_t place = size_t(verb) - 1;
  return place < std::size(kVerbNames) ? kVerbNames[place] : "unknown operation";
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
  const bool hasParts = call.root >= 0 && call.tensors > 0 && call.lengths == 0;
  if (call.tensors > 0 && !hasParts) {
    char which[16];
    std::snprintf(which, sizeof(which), "%08x", call.lengths);
    text +=
        std::string(" in ") + std::to_string(call.tensors) + " tensors of the lengths #" + which;
  }
  const bool reduces = call.verb == Verb::kAllreduce || call.verb == Verb::kReduce ||
                       call.verb == Verb::kReduceScatter;
  if (reduces) text += std::string(", ") + reduceName(call.reduce);
  if (call.root >= 0 && (call.verb == Verb::kAllgather || call.verb == Verb::kReduceScatter)) {
    text += ", parts for " + std::to_string(call.root) + " ranks" +
            (call.isBeyond ? " without the caller" : "");
  } else if (call.root >= 0) {
    text += ", root " + std::to_string(call.root);
  }
  if (hasParts)
    text += ", parts for " + std::to_string(call.tensors) + " ranks" +
            (call.isBeyond ? " without the caller" : "");
  return text + ")";
}

}  // namespace mooncake
