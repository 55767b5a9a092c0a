#include "backend/profile.h"

#include <ATen/record_function.h>

namespace mooncake {
namespace {

// Names that torch's own backends use: tools that read traces look for them.
const char* eventOf(c10d::OpType type) {
  switch (type) {
    case c10d::OpType::ALLREDUCE:
    case c10d::OpType::ALLREDUCE_COALESCED:
      return "all_reduce";
    case c10d::OpType::_ALLREDUCE_SPARSE:
      return "sparse_all_reduce";
    case c10d::OpType::BROADCAST:
      return "broadcast";
    case c10d::OpType::REDUCE:
      return "reduce";
    case c10d::OpType::ALLGATHER:
    case c10d::OpType::ALLGATHER_COALESCED:
      return "all_gather";
    case c10d::OpType::_ALLGATHER_BASE:
      return "_all_gather_base";
    case c10d::OpType::GATHER:
      return "gather";
    case c10d::OpType::SCATTER:
      return "scatter";
    case c10d::OpType::REDUCE_SCATTER:
    case c10d::OpType::COALESCED:
      return "reduce_scatter";
    case c10d::OpType::_REDUCE_SCATTER_BASE:
      return "_reduce_scatter_base";
    case c10d::OpType::ALLTOALL:
    case c10d::OpType::ALLTOALL_BASE:
      return "all_to_all";
    case c10d::OpType::BARRIER:
      return "barrier";
    case c10d::OpType::SEND:
      return "send";
    case c10d::OpType::RECV:
      return "recv";
    case c10d::OpType::RECVANYSOURCE:
      return "recvAnySource";
    default:
      return "unknown";
  }
}

}  // namespace

Profile profileOf(const std::string& backend, c10d::OpType type, at::TensorList inputs) {
  if (!at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) return {};
  return {backend + ":" + eventOf(type), inputs.vec()};
}

}  // namespace mooncake
