#include <cstring>
#include <utility>

#include "backend/arguments.h"
#include "backend/calls/collective_calls.h"
#include "base/hash.h"
#include "collectives/buffers.h"
#include "collectives/collectives.h"

namespace mooncake {
namespace {

using Use = Operand::Use;

// all_reduce.

HostRun allreduceOnHost(const Collective& call, const Group&) {
  const char* const name = call.kind->name;
  const at::Tensor& tensor = onlyTensor(call.input().list(), name);
  checkOutput(tensor, call.input().what);
  return [reduction = reductionOf(tensor, *call.op, name),
          flat = premultiplied(tensor, *call.op, name),
          timeout = call.timeout](Group& series, InputFeed* feed) {
    Status status = allreduce(series, flat.bytes(), reduction, Deadline::after(timeout), feed);
    if (status.ok()) flat.copyBack();
    return status;
  };
}

// Also of reduce.
InputCut cutAllreduce(const Collective& call, int) {
  const Tensors& tensors = call.input().list();
  return tensors.size() == 1 ? cutReduction(*call.op, tensors[0]) : InputCut{};
}

std::optional<KernelRun> allreduceByKernel(const Collective& call, int, int) {
  if (call.input().list().size() != 1) return std::nullopt;
  const at::Tensor& tensor = call.input().tensor();
  return KernelRun{
      .launch =
          [tensor, what = call.input().what, op = *call.op, name = call.kind->name](
              PeerCollectives& peers, const PeerCollectives::Tensors& plain, Deadline deadline) {
            refuseOwnOverlap(tensor, what);
            return peers.reduce({.name = "all_reduce", .mayBeTwoShot = true}, plain,
                                kindOf(op, name), -1, deadline);
          },
      .count = tensor.numel()};
}

constexpr CollectiveKind kAllreduce{
    .type = c10d::OpType::ALLREDUCE,
    .name = "all_reduce",
    .onHost = allreduceOnHost,
    .cut = cutAllreduce,
    .byKernel = allreduceByKernel,
    .isInPlace = true,
};

// reduce.

HostRun reduceOnHost(const Collective& call, const Group& group) {
  const char* const name = call.kind->name;
  const at::Tensor& tensor = onlyTensor(call.input().list(), name);
  checkUsed(tensor, call.root == group.rank(), call.input().what);
  return [reduction = reductionOf(tensor, *call.op, name),
          flat = premultiplied(tensor, *call.op, name),
          to = rootOf(call.root, call.rootTensor, group.extent(), name),
          timeout = call.timeout](Group& series, InputFeed* feed) {
    Status status = reduce(series, flat.bytes(), reduction, to, Deadline::after(timeout), feed);
    if (status.ok() && to == series.rank()) flat.copyBack();
    return status;
  };
}

std::optional<KernelRun> reduceByKernel(const Collective& call, int, int size) {
  if (call.input().list().size() != 1 || !isRoot(call.root, call.rootTensor, size))
    return std::nullopt;
  const at::Tensor& tensor = call.input().tensor();
  return KernelRun{
      .launch =
          [tensor, isOurs = call.input().isWritten(), what = call.input().what, op = *call.op,
           name = call.kind->name, root = int(call.root)](
              PeerCollectives& peers, const PeerCollectives::Tensors& plain, Deadline deadline) {
            if (isOurs) refuseOwnOverlap(tensor, what);
            return peers.reduce({.name = "reduce", .isToRoot = true}, plain, kindOf(op, name), root,
                                deadline);
          },
      .count = tensor.numel(),
      .root = int(call.root)};
}

constexpr CollectiveKind kReduce{
    .type = c10d::OpType::REDUCE,
    .name = "reduce",
    .onHost = reduceOnHost,
    .cut = cutAllreduce,
    .byKernel = reduceByKernel,
    .isInPlace = true,
};

// reduce_scatter.

// One part for each rank, of different lengths, as rows of the length of the longest part.
struct Rows {
  at::Tensor data;
  uint32_t lengths = 1;  // hash of the parts' lengths: must be the same on all ranks
};

Rows rowsOf(const std::vector<Flat>& parts) {
  int64_t longest = 0;
  Rows rows;
  for (const Flat& part : parts) {
    longest = std::max(longest, part.tensor().numel());
    rows.lengths = fnv1a({part.bytes().size()}, rows.lengths);
  }
  const at::NoGradGuard plain;
  rows.data = at::zeros({int64_t(parts.size()), longest}, parts[0].tensor().scalar_type());
  for (size_t r = 0; r < parts.size(); ++r) {
    if (parts[r].bytes().empty()) continue;
    std::memcpy(rows.data[int64_t(r)].data_ptr(), parts[r].bytes().data(), parts[r].bytes().size());
  }
  return rows;
}

HostRun unevenReduceScatter(const Collective& call, Reduction reduction, std::vector<Flat> in) {
  return [reduction, output = call.output().tensor(), in = std::move(in), timeout = call.timeout](
             Group& series, InputFeed*) {
    const Rows rows = rowsOf(in);
    const at::Tensor longest = at::empty_like(rows.data[0]);
    const Buffer from{bytesOf(rows.data), reduction.dtype, rows.lengths};
    const Buffer to{bytesOf(longest), reduction.dtype, rows.lengths};
    Status status = reduceScatter(series, Buffers(&from, 1), Buffers(&to, 1), reduction.kind,
                                  Deadline::after(timeout));
    if (status.ok()) Flat(output, longest.narrow(0, 0, output.numel())).copyBack();
    return status;
  };
}

HostRun reduceScatterOnHost(const Collective& call, const Group& group) {
  const char* const name = call.kind->name;
  const at::Tensor& output = onlyTensor(call.output().list(), name);
  checkOutput(output, call.output().what);
  const Tensors& inputs = onlyList(call.input().lists, name);
  checkEachRank(inputs, output, group.rank(), group.extent(), name, "input");
  const Reduction reduction = reductionOf(output, *call.op, name);
  std::vector<Flat> in = premultipliedAll(inputs, *call.op, name);
  if (!areAlike(inputs)) return unevenReduceScatter(call, reduction, std::move(in));
  Flat out = outputBeside(output, in);
  return [reduction, in = std::move(in), out = std::move(out), timeout = call.timeout](
             Group& series, InputFeed* feed) {
    std::vector<Buffer> parts;
    for (const Flat& part : in) parts.push_back({part.bytes(), reduction.dtype});
    const Buffer result{out.bytes(), reduction.dtype};
    Status status = reduceScatter(series, parts, Buffers(&result, 1), reduction.kind,
                                  Deadline::after(timeout), feed);
    if (status.ok()) out.copyBack();
    return status;
  };
}

InputCut cutReduceScatter(const Collective& call, int) {
  const TensorLists& inputs = call.input().lists;
  if (call.output().list().size() != 1 || inputs.size() != 1 || !areAlike(inputs[0])) return {};
  return cutReduction(*call.op, call.output().tensor(), inputs[0].size());
}

// Also of reduce_scatter_tensor.
KernelRun reduceScatterKernel(const Collective& call, int size) {
  return {.launch =
              [output = call.output().tensor(), what = call.output().what, op = *call.op,
               name = call.kind->name](PeerCollectives& peers,
                                       const PeerCollectives::Tensors& plain, Deadline deadline) {
                refuseOwnOverlap(output, what);
                return peers.reduce({.name = "reduce_scatter", .isPerRank = true}, plain,
                                    kindOf(op, name), -1, deadline);
              },
          .parts = size,
          .count = call.output().tensor().numel()};
}

std::optional<KernelRun> reduceScatterByKernel(const Collective& call, int, int size) {
  if (call.output().list().size() != 1 ||
      !isListFor(call.input().lists, call.output().tensor(), size))
    return std::nullopt;
  return reduceScatterKernel(call, size);
}

constexpr CollectiveKind kReduceScatter{
    .type = c10d::OpType::REDUCE_SCATTER,
    .name = "reduce_scatter",
    .onHost = reduceScatterOnHost,
    .cut = cutReduceScatter,
    .byKernel = reduceScatterByKernel,
    .hasInputLists = true,
};

// reduce_scatter_tensor.

HostRun reduceScatterBaseOnHost(const Collective& call, const Group& group) {
  const char* const name = call.kind->name;
  const at::Tensor &input = call.input().tensor(), &output = call.output().tensor();
  checkOutput(output, call.output().what);
  throwIfError(checkTensor(input, call.input().what));
  checkSameType(output, input, name);
  partsIn(input, output, group.extent(),
          "reduce_scatter_tensor: the input " + sizesOf(input) + " must hold " +
              std::to_string(group.extent()) + " times the output " + sizesOf(output));
  const Reduction reduction = reductionOf(input, *call.op, name);
  const Flat in = premultiplied(input, *call.op, name);
  return [reduction, in, out = outputBeside(output, std::span(&in, 1)), timeout = call.timeout](
             Group& series, InputFeed* feed) {
    Status status =
        reduceScatter(series, in.bytes(), out.bytes(), reduction, Deadline::after(timeout), feed);
    if (status.ok()) out.copyBack();
    return status;
  };
}

bool hasPartForEach(const Collective& call, int size) {
  const at::Tensor &input = call.input().tensor(), &output = call.output().tensor();
  return output.defined() && input.defined() && input.numel() == output.numel() * size;
}

InputCut cutReduceScatterBase(const Collective& call, int size) {
  if (!hasPartForEach(call, size)) return {};
  return cutReduction(*call.op, call.output().tensor(), size_t(size), size_t(size));
}

std::optional<KernelRun> reduceScatterBaseByKernel(const Collective& call, int, int size) {
  if (!hasPartForEach(call, size)) return std::nullopt;
  return reduceScatterKernel(call, size);
}

constexpr CollectiveKind kReduceScatterBase{
    .type = c10d::OpType::_REDUCE_SCATTER_BASE,
    .name = "reduce_scatter_tensor",
    .onHost = reduceScatterBaseOnHost,
    .cut = cutReduceScatterBase,
    .byKernel = reduceScatterBaseByKernel,
    .event = "_reduce_scatter_base",
};

}  // namespace

Collective allreduceCall(const Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return {.kind = &kAllreduce,
          .given = {tensors, Use::kInOut, "the tensor of all_reduce"},
          .op = opts.reduceOp,
          .timeout = opts.timeout,
          .isAsync = opts.asyncOp};
}

Collective reduceCall(const Tensors& tensors, int rank, const c10d::ReduceOptions& opts) {
  return {
      .kind = &kReduce,
      .given = {tensors, opts.rootRank == rank ? Use::kInOut : Use::kInput, "the tensor of reduce"},
      .op = opts.reduceOp,
      .root = opts.rootRank,
      .rootTensor = opts.rootTensor,
      .timeout = opts.timeout,
      .isAsync = opts.asyncOp};
}

Collective reduceScatterCall(const Tensors& outputs, const TensorLists& inputs,
                             const c10d::ReduceScatterOptions& opts) {
  return {.kind = &kReduceScatter,
          .given = {inputs, Use::kInput, "an input of reduce_scatter"},
          .result = {outputs, Use::kOutput, "the output of reduce_scatter"},
          .op = opts.reduceOp,
          .timeout = opts.timeout,
          .isAsync = opts.asyncOp};
}

Collective reduceScatterBaseCall(const at::Tensor& output, const at::Tensor& input,
                                 const c10d::ReduceScatterOptions& opts) {
  return {.kind = &kReduceScatterBase,
          .given = {input, Use::kInput, "the input of reduce_scatter_tensor"},
          .result = {output, Use::kOutput, "the output of reduce_scatter_tensor"},
          .op = opts.reduceOp,
          .timeout = opts.timeout,
          .isAsync = opts.asyncOp};
}

}  // namespace mooncake
