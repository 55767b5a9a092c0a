#include <utility>

#include "backend/arguments.h"
#include "backend/calls/collective_calls.h"
#include "collectives/collectives.h"

namespace mooncake {
namespace {

std::vector<ConstSpan> readable(const std::vector<Span>& spans) {
  return std::vector<ConstSpan>(spans.begin(), spans.end());
}

HostRun alltoallOnHost(const Collective& call, const Group& group) {
  const char* const name = call.kind->name;
  const Tensors &inputs = call.input().list(), &outputs = call.output().list();
  const size_t size = size_t(group.extent());
  if (inputs.size() != size || outputs.size() != size) {
    refuse("all_to_all needs one input and one output for each of the " + std::to_string(size) +
           " ranks, not " + std::to_string(inputs.size()) + " and " +
           std::to_string(outputs.size()));
  }
  for (size_t r = 0; r < size; ++r) {
    throwIfError(checkTensor(inputs[r], call.input().what));
    throwIfError(checkTensor(outputs[r], call.output().what));
    checkSameType(inputs[r], inputs[0], name);
    checkSameType(outputs[r], inputs[0], name);
  }
  checkApart(outputs, call.output().what);
  std::vector<Flat> in = flatten(inputs), out;
  for (const at::Tensor& output : outputs) out.push_back(outputBeside(output, in));
  return [in = std::move(in), out = std::move(out), dtype = typeOf(inputs[0], name),
          timeout = call.timeout](Group& series, InputFeed* feed) {
    Status status = alltoall(series, readable(spansOf(in)), spansOf(out), dtype,
                             Deadline::after(timeout), feed);
    copyBack(status, out);
    return status;
  };
}

InputCut cutAlltoall(const Collective& call, int) { return cutParts(call.input().list()); }

std::optional<KernelRun> alltoallByKernel(const Collective& call, int, int size) {
  const Tensors &inputs = call.input().list(), &outputs = call.output().list();
  if (inputs.size() != size_t(size) || outputs.size() != inputs.size()) return std::nullopt;
  return KernelRun{
      .launch =
          [inputs, outputs, what = call.output().what](
              PeerCollectives& peers, const PeerCollectives::Tensors& plain, Deadline deadline) {
            checkApart(outputs, what);
            return peers.exchange({.name = "all_to_all"}, plain,
                                  {bytesOfEach(inputs), bytesOfEach(outputs)}, deadline);
          },
      .hasSplits = true};
}

HostRun alltoallBaseOnHost(const Collective& call, const Group& group) {
  const char* const name = call.kind->name;
  const at::Tensor &input = call.input().tensor(), &output = call.output().tensor();
  checkOutput(output, call.output().what);
  throwIfError(checkTensor(input, call.input().what));
  checkSameType(output, input, name);
  auto sends = elementsPerRank(input, call.inputSplits, group.extent(), "input");
  auto receives = elementsPerRank(output, call.outputSplits, group.extent(), "output");
  const Flat in(input);
  return [in, out = outputBeside(output, std::span(&in, 1)), sends = std::move(sends),
          receives = std::move(receives), dtype = typeOf(input, name),
          timeout = call.timeout](Group& series, InputFeed* feed) {
    Status status = alltoall(series, readable(cut(in.bytes(), sends, dtypeSize(dtype))),
                             cut(out.bytes(), receives, dtypeSize(dtype)), dtype,
                             Deadline::after(timeout), feed);
    if (status.ok()) out.copyBack();
    return status;
  };
}

InputCut cutAlltoallBase(const Collective& call, int size) {
  const Tensors& inputs = call.input().list();
  return cutParts(inputs, elementsPerRank(inputs[0], call.inputSplits, size, "input"));
}

std::optional<KernelRun> alltoallBaseByKernel(const Collective& call, int, int size) {
  const at::Tensor &input = call.input().tensor(), &output = call.output().tensor();
  if (!output.defined() || !input.defined()) return std::nullopt;
  const auto launch =
      [=, sends = call.inputSplits, receives = call.outputSplits, what = call.output().what](
          PeerCollectives& peers, const PeerCollectives::Tensors& plain, Deadline deadline) {
        refuseOwnOverlap(output, what);
        PeerCollectives::Splits splits;
        for (const int64_t count : elementsPerRank(input, sends, size, "input"))
          splits.sends.push_back(size_t(count) * input.itemsize());
        for (const int64_t count : elementsPerRank(output, receives, size, "output"))
          splits.receives.push_back(size_t(count) * output.itemsize());
        return peers.exchange({.name = "all_to_all"}, plain, splits, deadline);
      };
  return KernelRun{.launch = launch, .hasSplits = true};
}

constexpr CollectiveKind kAlltoall{c10d::OpType::ALLTOALL, "all_to_all", alltoallOnHost,
                                   cutAlltoall, alltoallByKernel};
constexpr CollectiveKind kAlltoallBase{
    .type = c10d::OpType::ALLTOALL_BASE,
    .name = "all_to_all_single",
    .onHost = alltoallBaseOnHost,
    .cut = cutAlltoallBase,
    .byKernel = alltoallBaseByKernel,
    .event = "all_to_all",
};

}  // namespace

Collective alltoallCall(const Tensors& outputs, const Tensors& inputs,
                        const c10d::AllToAllOptions& opts) {
  return {.kind = &kAlltoall,
          .given = {inputs, Operand::Use::kInput, "an input of all_to_all"},
          .result = {outputs, Operand::Use::kOutput, "an output of all_to_all"},
          .timeout = opts.timeout,
          .isAsync = opts.asyncOp};
}

Collective alltoallBaseCall(const at::Tensor& output, const at::Tensor& input,
                            const std::vector<int64_t>& outputSplits,
                            const std::vector<int64_t>& inputSplits,
                            const c10d::AllToAllOptions& opts) {
  return {.kind = &kAlltoallBase,
          .given = {input, Operand::Use::kInput, "the input of all_to_all_single"},
          .result = {output, Operand::Use::kOutput, "the output of all_to_all_single"},
          .inputSplits = inputSplits,
          .outputSplits = outputSplits,
          .timeout = opts.timeout,
          .isAsync = opts.asyncOp};
}

}  // namespace mooncake
