#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "backend/calls/collective.h"

// Each function describes one collective of c10d. Its file has beside it how the call is checked and
// done on host memory, and by which kernel.
namespace mooncake {

// reductions.cc
Collective allreduceCall(const Tensors& tensors, const c10d::AllreduceOptions& opts);
Collective reduceCall(const Tensors& tensors, int rank, const c10d::ReduceOptions& opts);
Collective reduceScatterCall(const Tensors& outputs, const TensorLists& inputs,
                             const c10d::ReduceScatterOptions& opts);
Collective reduceScatterBaseCall(const at::Tensor& output, const at::Tensor& input,
                                 const c10d::ReduceScatterOptions& opts);
// sparse_allreduce.cc
Collective sparseAllreduceCall(const at::Tensor& tensor, const c10d::AllreduceOptions& opts);
// copies.cc
Collective broadcastCall(const Tensors& tensors, int rank, const c10d::BroadcastOptions& opts);
Collective allgatherCall(const TensorLists& outputs, const Tensors& inputs,
                         const c10d::AllgatherOptions& opts);
Collective allgatherBaseCall(const at::Tensor& output, const at::Tensor& input,
                             const c10d::AllgatherOptions& opts);
Collective gatherCall(const TensorLists& outputs, const Tensors& inputs,
                      const c10d::GatherOptions& opts);
Collective scatterCall(const Tensors& outputs, const TensorLists& inputs,
                       const c10d::ScatterOptions& opts);
// all_to_all.cc
Collective alltoallCall(const Tensors& outputs, const Tensors& inputs,
                        const c10d::AllToAllOptions& opts);
Collective alltoallBaseCall(const at::Tensor& output, const at::Tensor& input,
                            const std::vector<int64_t>& outputSplits,
                            const std::vector<int64_t>& inputSplits,
                            const c10d::AllToAllOptions& opts);
// coalesced.cc
Collective allreduceCoalescedCall(const Tensors& tensors,
                                  const c10d::AllreduceCoalescedOptions& opts);
Collective allgatherCoalescedCall(const TensorLists& outputs, const Tensors& inputs,
                                  const c10d::AllgatherOptions& opts);
Collective allgatherIntoTensorsCall(const Tensors& outputs, const Tensors& inputs,
                                    const c10d::AllgatherOptions& opts);
Collective reduceScatterTensorsCall(const Tensors& outputs, const Tensors& inputs,
                                    const c10d::ReduceScatterOptions& opts);
// barrier.cc
Collective barrierCall(const c10d::BarrierOptions& opts);

}  // namespace mooncake
