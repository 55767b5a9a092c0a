// Several tensors in one operation. They may differ in type.
#include <utility>

#include "backend/arguments.h"
#include "backend/calls/collective_calls.h"
#include "collectives/buffers.h"
#include "collectives/collectives.h"

namespace mooncake {
namespace {

using Use = Operand::Use;

void checkAny(const Tensors& tensors, const char* operation) {
  if (tensors.empty()) refuse(std::string(operation) + " needs at least one tensor");
}

void checkSameNumber(const Tensors& outputs, const Tensors& inputs, const char* operation) {
  checkAny(inputs, operation);
  if (outputs.size() != inputs.size()) {
    refuse(std::string(operation) + ": " + std::to_string(inputs.size()) + " inputs and " +
           std::to_string(outputs.size()) + " outputs");
  }
}

// `large` has the elements of `small` once per rank.
void checkTimes(const at::Tensor& large, const at::Tensor& small, int size, const char* operation) {
  checkSameType(large, small, operation);
  (void)typeOf(small, operation);  // some types cannot be sent
  if (large.numel() != small.numel() * size) {
    refuse(std::string(operation) + ": " + sizesOf(large) + " must hold " + std::to_string(size) +
           " times " + sizesOf(small));
  }
}

// True: the tensors are exchanged in slots, which cost the same for any number of tensors.
bool fit(const std::vector<Flat>& given, size_t most) {
  size_t bytes = 0;
  for (const Flat& flat : given) bytes += aligned(flat.place().size());
  return bytes <= most;
}

HostRun allreduceOnHost(const Collective& call, const Group& group) {
  const char* const name = call.kind->name;
  const Tensors& tensors = call.input().list();
  checkAny(tensors, name);
  for (const at::Tensor& tensor : tensors) {
    checkOutput(tensor, call.input().what);
    reductionOf(tensor, *call.op, name);
  }
  std::vector<Flat> flats = premultipliedAll(tensors, *call.op, name);
  keepApart(flats);
  const bool isShort = fit(flats, group.eagerBytes());
  return [list = FlatList(std::move(flats), 1, isShort), kind = kindOf(*call.op, name),
          timeout = call.timeout](Group& series, InputFeed*) {
    Status status = allreduce(series, list.buffers(), kind, Deadline::after(timeout));
    if (status.ok()) list.copyBack();
    return status;
  };
}

HostRun allgatherOnHost(const Collective& call, const Group& group) {
  const char* const name = call.kind->name;
  const Tensors& inputs = call.input().list();
  const TensorLists& outputs = call.output().lists;
  const int size = group.extent();
  checkAny(inputs, name);
  if (outputs.size() != size_t(size)) {
    refuse(std::string(name) + " needs one list of outputs for each of the " +
           std::to_string(size) + " ranks, not " + std::to_string(outputs.size()));
  }
  for (const at::Tensor& input : inputs) throwIfError(checkTensor(input, call.input().what));
  for (const Tensors& list : outputs) {
    checkSameNumber(list, inputs, name);
    for (size_t i = 0; i < list.size(); ++i) {
      checkOutput(list[i], call.output().what);
      checkTimes(list[i], inputs[i], 1, name);
    }
  }
  checkApart(call.results(), call.output().what);
  std::vector<std::vector<Flat>> out;
  std::vector<Span> places;
  for (const Tensors& list : outputs) {
    out.push_back(flatten(list));
    for (const Flat& flat : out.back()) places.push_back(flat.place());
  }
  std::vector<Flat> in = inputsBeside(inputs, places, group.rank());
  const bool isShort = fit(in, mostGatheredInSlots(group, in.size()));
  std::vector<FlatList> lists;
  for (auto& flats : out) lists.emplace_back(std::move(flats), 1, isShort);
  return [in = FlatList(std::move(in), 1, isShort), lists = std::move(lists),
          timeout = call.timeout](Group& series, InputFeed*) {
    std::vector<Span> parts;
    for (const FlatList& list : lists) {
      for (const Span part : list.rows()) parts.push_back(part);
    }
    Status status = allgather(series, in.buffers(), parts, Deadline::after(timeout));
    for (const FlatList& list : lists) {
      if (status.ok()) list.copyBack();
    }
    return status;
  };
}

HostRun allgatherIntoTensorsOnHost(const Collective& call, const Group& group) {
  const char* const name = call.kind->name;
  const Tensors &inputs = call.input().list(), &outputs = call.output().list();
  const int size = group.extent();
  checkSameNumber(outputs, inputs, name);
  checkApart(outputs, call.output().what);
  for (size_t i = 0; i < inputs.size(); ++i) {
    throwIfError(checkTensor(inputs[i], call.input().what));
    checkTimes(outputs[i], inputs[i], size, name);
  }
  std::vector<Flat> out = flatten(outputs);
  std::vector<Span> places;
  for (size_t r = 0; r < size_t(size); ++r) {
    for (const Flat& flat : out) {
      const size_t each = flat.place().size() / size_t(size);
      places.push_back(flat.place().subspan(r * each, each));
    }
  }
  std::vector<Flat> in = inputsBeside(inputs, places, group.rank());
  const bool isShort = fit(in, mostGatheredInSlots(group, in.size()));
  return [in = FlatList(std::move(in), 1, isShort), out = FlatList(std::move(out), size, isShort),
          timeout = call.timeout](Group& series, InputFeed*) {
    Status status = allgather(series, in.buffers(), out.rows(), Deadline::after(timeout));
    if (status.ok()) out.copyBack();
    return status;
  };
}

HostRun reduceScatterTensorsOnHost(const Collective& call, const Group& group) {
  const char* const name = call.kind->name;
  const Tensors &inputs = call.input().list(), &outputs = call.output().list();
  const int size = group.extent();
  checkSameNumber(outputs, inputs, name);
  checkApart(outputs, call.output().what);
  for (size_t i = 0; i < inputs.size(); ++i) {
    throwIfError(checkTensor(inputs[i], call.input().what));
    checkTimes(inputs[i], outputs[i], size, name);
    reductionOf(outputs[i], *call.op, name);
  }
  std::vector<Flat> in = premultipliedAll(inputs, *call.op, name), out;
  for (const at::Tensor& output : outputs) out.push_back(outputBeside(output, in));
  const bool isShort = fit(in, group.eagerBytes());
  return [in = FlatList(std::move(in), size, isShort), out = FlatList(std::move(out), 1, isShort),
          kind = kindOf(*call.op, name), timeout = call.timeout](Group& series, InputFeed*) {
    Status status =
        reduceScatter(series, in.buffers(), out.buffers(), kind, Deadline::after(timeout));
    if (status.ok()) out.copyBack();
    return status;
  };
}

constexpr CollectiveKind kAllreduce{
    .type = c10d::OpType::ALLREDUCE_COALESCED,
    .name = "all_reduce_coalesced",
    .onHost = allreduceOnHost,
    .event = "all_reduce",
    .isInPlace = true,
};
constexpr CollectiveKind kAllgather{
    .type = c10d::OpType::ALLGATHER_COALESCED,
    .name = "all_gather_coalesced",
    .onHost = allgatherOnHost,
    .event = "all_gather",
};
constexpr CollectiveKind kAllgatherIntoTensors{
    .type = c10d::OpType::ALLGATHER_COALESCED,
    .name = "all_gather_into_tensor_coalesced",
    .onHost = allgatherIntoTensorsOnHost,
    .event = "all_gather",
};
constexpr CollectiveKind kReduceScatterTensors{
    .type = c10d::OpType::COALESCED,
    .name = "reduce_scatter_tensor_coalesced",
    .onHost = reduceScatterTensorsOnHost,
    .event = "reduce_scatter",
};

}  // namespace

Collective allreduceCoalescedCall(const Tensors& tensors,
                                  const c10d::AllreduceCoalescedOptions& opts) {
  return {.kind = &kAllreduce,
          .given = {tensors, Use::kInOut, "a tensor of all_reduce_coalesced"},
          .op = opts.reduceOp,
          .timeout = opts.timeout,
          .isAsync = opts.asyncOp};
}

Collective allgatherCoalescedCall(const TensorLists& outputs, const Tensors& inputs,
                                  const c10d::AllgatherOptions& opts) {
  return {.kind = &kAllgather,
          .given = {inputs, Use::kInput, "an input of all_gather_coalesced"},
          .result = {outputs, Use::kOutput, "an output of all_gather_coalesced"},
          .timeout = opts.timeout,
          .isAsync = opts.asyncOp};
}

Collective allgatherIntoTensorsCall(const Tensors& outputs, const Tensors& inputs,
                                    const c10d::AllgatherOptions& opts) {
  return {.kind = &kAllgatherIntoTensors,
          .given = {inputs, Use::kInput, "an input of all_gather_into_tensor_coalesced"},
          .result = {outputs, Use::kOutput, "an output of all_gather_into_tensor_coalesced"},
          .timeout = opts.timeout,
          .isAsync = opts.asyncOp};
}

Collective reduceScatterTensorsCall(const Tensors& outputs, const Tensors& inputs,
                                    const c10d::ReduceScatterOptions& opts) {
  return {.kind = &kReduceScatterTensors,
          .given = {inputs, Use::kInput, "an input of reduce_scatter_tensor_coalesced"},
          .result = {outputs, Use::kOutput, "an output of reduce_scatter_tensor_coalesced"},
          .op = opts.reduceOp,
          .timeout = opts.timeout,
          .isAsync = opts.asyncOp};
}

}  // namespace mooncake
