#include "backend/device/peer_calls.h"

#include <algorithm>

#include "backend/arguments.h"

namespace mooncake {
namespace {

using Tensors = PeerCalls::Tensors;
using Plain = PeerCollectives::Tensors;
using c10d::OpType;

std::vector<size_t> bytesOfEach(const Tensors& tensors) {
  std::vector<size_t> bytes;
  for (const at::Tensor& tensor : tensors) bytes.push_back(tensor.nbytes());
  return bytes;
}

bool areEmpty(const PeerCalls::Lists& lists) {
  return std::ranges::all_of(lists, [](const Tensors& list) { return list.empty(); });
}

}  // namespace

bool PeerCalls::isRoot(int64_t root, int64_t rootTensor) const {
  return root >= 0 && root < size_ && rootTensor == 0;
}

// One list, of a tensor for each rank, all as large as `like`.
bool PeerCalls::isList(const Lists& lists, const at::Tensor& like) const {
  return lists.size() == 1 && lists[0].size() == size_t(size_) && areAlike(lists[0]) &&
         lists[0][0].numel() == like.numel();
}

PeerCalls::Call PeerCalls::allreduce(const Tensors& tensors,
                                     const c10d::AllreduceOptions& opts) const {
  if (tensors.size() != 1) return std::nullopt;
  const auto launch = [=, *this](PeerCollectives& peers, const Plain& plain) {
    refuseOwnOverlap(tensors[0], "the tensor of all_reduce");
    return peers.allreduce(plain, kindOf(opts.reduceOp, "all_reduce"), deadline_);
  };
  return PeerRoute::Call{OpType::ALLREDUCE,  tensors, tensors, tensors, 1,
                         tensors[0].numel(), -1,      launch,  false,   opts.reduceOp,
                         "all_reduce"};
}

PeerCalls::Call PeerCalls::reduce(const Tensors& tensors, const c10d::ReduceOptions& opts) const {
  const auto root = int(opts.rootRank);
  if (tensors.size() != 1 || !isRoot(root, opts.rootTensor)) return std::nullopt;
  const bool isOurs = root == rank_;
  const auto launch = [=, *this](PeerCollectives& peers, const Plain& plain) {
    if (isOurs) refuseOwnOverlap(tensors[0], "the tensor of reduce");
    return peers.reduce(plain, kindOf(opts.reduceOp, "reduce"), root, deadline_);
  };
  const Tensors outputs = isOurs ? tensors : Tensors();
  return PeerRoute::Call{
      OpType::REDUCE, tensors, outputs, tensors,       1,       tensors[0].numel(),
      root,           launch,  false,   opts.reduceOp, "reduce"};
}

PeerCalls::Call PeerCalls::broadcast(const Tensors& tensors,
                                     const c10d::BroadcastOptions& opts) const {
  const auto root = int(opts.rootRank);
  if (tensors.size() != 1 || !isRoot(root, opts.rootTensor)) return std::nullopt;
  const bool isOurs = root == rank_;
  const auto launch = [=, *this](PeerCollectives& peers, const Plain& plain) {
    if (!isOurs) refuseOwnOverlap(tensors[0], "the tensor of broadcast");
    return peers.broadcast(plain, root, deadline_);
  };
  const Tensors inputs = isOurs ? tensors : Tensors(), outputs = isOurs ? Tensors() : tensors;
  // No rank needs the root of an empty tensor.
  return PeerRoute::Call{OpType::BROADCAST,
                         inputs,
                         outputs,
                         tensors,
                         1,
                         tensors[0].numel(),
                         tensors[0].numel() ? root : -1,
                         launch};
}

PeerCalls::Call PeerCalls::allgather(const Lists& outputs, const Tensors& inputs) const {
  if (inputs.size() != 1 || outputs.size() != 1 || outputs[0].size() != size_t(size_))
    return std::nullopt;
  if (!areAlike(outputs[0])) return allgatherUneven(outputs[0], inputs);
  if (!isList(outputs, inputs[0])) return std::nullopt;
  const auto launch = [=, *this](PeerCollectives& peers, const Plain& plain) {
    checkApart(outputs[0], "an output of all_gather");
    return peers.allgather(plain, deadline_);
  };
  return PeerRoute::Call{OpType::ALLGATHER, inputs, outputs[0], outputs[0], 1,
                         inputs[0].numel(), -1,     launch};
}

PeerCalls::Call PeerCalls::allgatherUneven(const Tensors& outputs, const Tensors& inputs) const {
  if (outputs[size_t(rank_)].numel() != inputs[0].numel()) return std::nullopt;
  const auto launch = [=, *this](PeerCollectives& peers, const Plain& plain) {
    checkApart(outputs, "an output of all_gather");
    return peers.allgatherUneven(plain, {bytesOfEach(inputs), bytesOfEach(outputs)}, deadline_);
  };
  return PeerRoute::Call{OpType::ALLGATHER, inputs, outputs, outputs, 1, 0, -1, launch, true};
}

PeerCalls::Call PeerCalls::allgatherBase(const at::Tensor& output, const at::Tensor& input) const {
  if (!output.defined() || !input.defined() || output.numel() != input.numel() * size_)
    return std::nullopt;
  const auto launch = [=, *this](PeerCollectives& peers, const Plain& plain) {
    refuseOwnOverlap(output, "the output of all_gather_into_tensor");
    return peers.allgather(plain, deadline_);
  };
  return PeerRoute::Call{OpType::_ALLGATHER_BASE, {input}, {output}, {output}, 1,
                         input.numel(),           -1,      launch};
}

PeerCalls::Call PeerCalls::alltoall(const Tensors& outputs, const Tensors& inputs) const {
  if (inputs.size() != size_t(size_) || outputs.size() != inputs.size()) return std::nullopt;
  const auto launch = [=, *this](PeerCollectives& peers, const Plain& plain) {
    checkApart(outputs, "an output of all_to_all");
    return peers.alltoall(plain, {bytesOfEach(inputs), bytesOfEach(outputs)}, deadline_);
  };
  return PeerRoute::Call{OpType::ALLTOALL, inputs, outputs, outputs, 1, 0, -1, launch, true};
}

PeerCalls::Call PeerCalls::alltoallBase(const at::Tensor& output, const at::Tensor& input,
                                        const std::vector<int64_t>& outputSplits,
                                        const std::vector<int64_t>& inputSplits) const {
  if (!output.defined() || !input.defined()) return std::nullopt;
  const auto launch = [=, *this](PeerCollectives& peers, const Plain& plain) {
    refuseOwnOverlap(output, "the output of all_to_all_single");
    PeerCollectives::Splits splits;
    for (const int64_t count : elementsPerRank(input, inputSplits, size_, "input"))
      splits.sends.push_back(size_t(count) * input.itemsize());
    for (const int64_t count : elementsPerRank(output, outputSplits, size_, "output"))
      splits.receives.push_back(size_t(count) * output.itemsize());
    return peers.alltoall(plain, splits, deadline_);
  };
  return PeerRoute::Call{
      OpType::ALLTOALL_BASE, {input}, {output}, {output}, 1, 0, -1, launch, true};
}

PeerCalls::Call PeerCalls::gather(const Lists& outputs, const Tensors& inputs,
                                  const c10d::GatherOptions& opts) const {
  const auto root = int(opts.rootRank);
  if (inputs.size() != 1 || !isRoot(root)) return std::nullopt;
  const bool isOurs = root == rank_;
  if (isOurs ? !isList(outputs, inputs[0]) : !areEmpty(outputs)) return std::nullopt;
  const Tensors results = isOurs ? outputs[0] : Tensors();
  const auto launch = [=, *this](PeerCollectives& peers, const Plain& plain) {
    checkApart(results, "an output of gather");
    return peers.gather(plain, root, deadline_);
  };
  return PeerRoute::Call{OpType::GATHER,    inputs, results, results, 1,
                         inputs[0].numel(), root,   launch};
}

PeerCalls::Call PeerCalls::scatter(const Tensors& outputs, const Lists& inputs,
                                   const c10d::ScatterOptions& opts) const {
  const auto root = int(opts.rootRank);
  if (outputs.size() != 1 || !isRoot(root)) return std::nullopt;
  const bool isOurs = root == rank_;
  if (isOurs ? !isList(inputs, outputs[0]) : !areEmpty(inputs)) return std::nullopt;
  const auto launch = [=, *this](PeerCollectives& peers, const Plain& plain) {
    refuseOwnOverlap(outputs[0], "the output of scatter");
    return peers.scatter(plain, root, deadline_);
  };
  return PeerRoute::Call{OpType::SCATTER,
                         isOurs ? inputs[0] : Tensors(),
                         outputs,
                         outputs,
                         size_,
                         outputs[0].numel(),
                         root,
                         launch};
}

PeerCalls::Call PeerCalls::reduceScatter(const Tensors& outputs, const Lists& inputs,
                                         const c10d::ReduceScatterOptions& opts) const {
  if (outputs.size() != 1 || !isList(inputs, outputs[0])) return std::nullopt;
  const auto launch = [=, *this](PeerCollectives& peers, const Plain& plain) {
    refuseOwnOverlap(outputs[0], "the output of reduce_scatter");
    return peers.reduceScatter(plain, kindOf(opts.reduceOp, "reduce_scatter"), deadline_);
  };
  return PeerRoute::Call{OpType::REDUCE_SCATTER, inputs[0], outputs, outputs, size_,
                         outputs[0].numel(),     -1,        launch,  false,   opts.reduceOp,
                         "reduce_scatter"};
}

PeerCalls::Call PeerCalls::reduceScatterBase(const at::Tensor& output, const at::Tensor& input,
                                             const c10d::ReduceScatterOptions& opts) const {
  if (!output.defined() || !input.defined() || input.numel() != output.numel() * size_)
    return std::nullopt;
  const auto launch = [=, *this](PeerCollectives& peers, const Plain& plain) {
    refuseOwnOverlap(output, "the output of reduce_scatter_tensor");
    return peers.reduceScatter(plain, kindOf(opts.reduceOp, "reduce_scatter_tensor"), deadline_);
  };
  return PeerRoute::Call{OpType::_REDUCE_SCATTER_BASE,
                         {input},
                         {output},
                         {output},
                         size_,
                         output.numel(),
                         -1,
                         launch,
                         false,
                         opts.reduceOp,
                         "reduce_scatter_tensor"};
}

}  // namespace mooncake
