#pragma once

#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "backend/calls/collective_calls.h"
#include "backend/coalescing.h"

namespace mooncake {

// The collectives of c10d's interface, each described as one Collective.
class C10dVerbs : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Backend::Backend;

  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override {
    const bool isSparse =
        tensors.size() == 1 && tensors[0].defined() && tensors[0].layout() == at::kSparse;
    return carryOut(isSparse ? sparseAllreduceCall(tensors[0], opts)
                             : allreduceCall(tensors, opts));
  }
  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) override {
    return carryOut(broadcastCall(tensors, rank_, opts));
  }
  WorkPtr reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) override {
    return carryOut(reduceCall(tensors, rank_, opts));
  }
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions& opts) override {
    return carryOut(allgatherCall(outputs, inputs, opts));
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override {
    return carryOut(allgatherBaseCall(output, input, opts));
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override {
    return carryOut(reduceScatterBaseCall(output, input, opts));
  }
  WorkPtr alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                   const c10d::AllToAllOptions& opts) override {
    return carryOut(alltoallCall(outputs, inputs, opts));
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& outputSplits,
                        std::vector<int64_t>& inputSplits,
                        const c10d::AllToAllOptions& opts) override {
    return carryOut(alltoallBaseCall(output, input, outputSplits, inputSplits, opts));
  }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override { return carryOut(barrierCall(opts)); }
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const c10d::GatherOptions& opts) override {
    return carryOut(gatherCall(outputs, inputs, opts));
  }
  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const c10d::ScatterOptions& opts) override {
    return carryOut(scatterCall(outputs, inputs, opts));
  }
  WorkPtr reduce_scatter(std::vector<at::Tensor>& outputs,
                         std::vector<std::vector<at::Tensor>>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    return carryOut(reduceScatterCall(outputs, inputs, opts));
  }
  // Several tensors in one operation. They may differ in type.
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override {
    return batches().within([&] { return carryOut(allreduceCoalescedCall(tensors, opts)); });
  }
  WorkPtr allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                              std::vector<at::Tensor>& inputs,
                              const c10d::AllgatherOptions& opts) override {
    return carryOut(allgatherCoalescedCall(outputs, inputs, opts));
  }
  WorkPtr allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    return batches().within(
        [&] { return carryOut(allgatherIntoTensorsCall(outputs, inputs, opts)); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    return batches().within(
        [&] { return carryOut(reduceScatterTensorsCall(outputs, inputs, opts)); });
  }
  // torch's call for sparse tensors of CUDA devices.
  WorkPtr allreduce_sparse(std::vector<at::Tensor>& tensors,
                           const c10d::AllreduceOptions& opts) override {
    return allreduce(tensors, opts);
  }

 private:
  // Does a collective. `call.timeout` may be kUnsetTimeout.
  virtual WorkPtr carryOut(Collective call) = 0;
  virtual Coalescing& batches() = 0;
};

}  // namespace mooncake
