#pragma once

#include <optional>
#include <vector>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "backend/device/peer_route.h"
#include "base/deadline.h"

namespace mooncake {

// Says how kernels do c10d's calls. Returns nullopt for a call that has to be staged, which then also
// finds wrong arguments. That follows from arguments which are equal on all ranks, unless they are
// wrong.
class PeerCalls {
 public:
  using Call = std::optional<PeerRoute::Call>;
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;

  PeerCalls(int rank, int size, Deadline deadline)
      : rank_(rank), size_(size), deadline_(deadline) {}

  Call allreduce(const Tensors& tensors, const c10d::AllreduceOptions& opts) const;
  Call reduce(const Tensors& tensors, const c10d::ReduceOptions& opts) const;
  Call broadcast(const Tensors& tensors, const c10d::BroadcastOptions& opts) const;
  Call allgather(const Lists& outputs, const Tensors& inputs) const;
  Call allgatherBase(const at::Tensor& output, const at::Tensor& input) const;
  Call alltoall(const Tensors& outputs, const Tensors& inputs) const;
  Call alltoallBase(const at::Tensor& output, const at::Tensor& input,
                    const std::vector<int64_t>& outputSplits,
                    const std::vector<int64_t>& inputSplits) const;
  Call gather(const Lists& outputs, const Tensors& inputs, const c10d::GatherOptions& opts) const;
  Call scatter(const Tensors& outputs, const Lists& inputs, const c10d::ScatterOptions& opts) const;
  Call reduceScatter(const Tensors& outputs, const Lists& inputs,
                     const c10d::ReduceScatterOptions& opts) const;
  Call reduceScatterBase(const at::Tensor& output, const at::Tensor& input,
                         const c10d::ReduceScatterOptions& opts) const;

 private:
  bool isRoot(int64_t root, int64_t rootTensor = 0) const;
  Call allgatherUneven(const Tensors& outputs, const Tensors& inputs) const;
  bool isList(const Lists& lists, const at::Tensor& like) const;

  const int rank_;
  const int size_;
  const Deadline deadline_;
};

}  // namespace mooncake
