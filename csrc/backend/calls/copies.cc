#include <algorithm>
#include <utility>

#include "backend/arguments.h"
#include "backend/calls/collective_calls.h"
#include "collectives/collectives.h"

namespace mooncake {
namespace {

using Use = Operand::Use;

// broadcast.

HostRun broadcastOnHost(const Collective& call, const Group& group) {
  const char* const name = call.kind->name;
  const at::Tensor& tensor = onlyTensor(call.input().list(), name);
  checkUsed(tensor, call.root != group.rank(), call.input().what);
  return [flat = Flat(tensor), dtype = typeOf(tensor, name),
          from = rootOf(call.root, call.rootTensor, group.extent(), name),
          timeout = call.timeout](Group& series, InputFeed* feed) {
    Status status = broadcast(series, flat.bytes(), dtype, from, Deadline::after(timeout), feed);
    if (status.ok() && from != series.rank()) flat.copyBack();
    return status;
  };
}

InputCut cutBroadcast(const Collective& call, int) {
  const Tensors& tensors = call.input().list();
  return tensors.size() == 1 ? cutPieces(tensors[0]) : InputCut{};
}

std::optional<KernelRun> broadcastByKernel(const Collective& call, int, int size) {
  if (call.input().list().size() != 1 || !isRoot(call.root, call.rootTensor, size))
    return std::nullopt;
  const at::Tensor& tensor = call.input().tensor();
  const auto launch =
      [tensor, isOurs = call.input().isRead(), what = call.input().what, root = int(call.root)](
          PeerCollectives& peers, const PeerCollectives::Tensors& plain, Deadline deadline) {
        if (!isOurs) refuseOwnOverlap(tensor, what);
        return peers.move({.name = "broadcast", .isFromRoot = true}, plain, root, deadline);
      };
  // No rank needs the root of an empty tensor.
  return KernelRun{
      .launch = launch, .count = tensor.numel(), .root = tensor.numel() ? int(call.root) : -1};
}

constexpr CollectiveKind kBroadcast{
    .type = c10d::OpType::BROADCAST,
    .name = "broadcast",
    .onHost = broadcastOnHost,
    .cut = cutBroadcast,
    .byKernel = broadcastByKernel,
    .isInPlace = true,
};

// all_gather.

HostRun unevenAllgather(const Collective& call, std::vector<Flat> out) {
  const at::Tensor& input = call.input().tensor();
  Flat in(input);
  in.standApart();  // outputs of other sizes may overlap it anywhere
  return [in = std::move(in), out = std::move(out), dtype = typeOf(input, call.kind->name),
          timeout = call.timeout](Group& series, InputFeed*) {
    const std::vector<ConstSpan> toEach(size_t(series.size()), in.bytes());
    Status status = alltoall(series, toEach, spansOf(out), dtype, Deadline::after(timeout));
    copyBack(status, out);
    return status;
  };
}

HostRun allgatherOnHost(const Collective& call, const Group& group) {
  const char* const name = call.kind->name;
  const at::Tensor& input = onlyTensor(call.input().list(), name);
  throwIfError(checkTensor(input, call.input().what));
  const Tensors& outputs = onlyList(call.output().lists, name);
  checkEachRank(outputs, input, group.rank(), group.extent(), name, "output");
  checkApart(outputs, call.output().what);
  std::vector<Flat> out = flatten(outputs);
  if (!areAlike(outputs)) return unevenAllgather(call, std::move(out));
  Flat in(input);
  if (size_t(group.rank()) < out.size())
    in = inputsBeside(call.input().list(), placesOf(out), group.rank())[0];
  return [in = std::move(in), out = std::move(out), dtype = typeOf(input, name),
          timeout = call.timeout](Group& series, InputFeed* feed) {
    Status status =
        allgather(series, in.bytes(), spansOf(out), dtype, Deadline::after(timeout), feed);
    copyBack(status, out);
    return status;
  };
}

InputCut cutAllgather(const Collective& call, int) {
  const Tensors& inputs = call.input().list();
  const TensorLists& outputs = call.output().lists;
  const bool isEven = inputs.size() == 1 && outputs.size() == 1 && areAlike(outputs[0]);
  return isEven ? cutPieces(inputs[0]) : InputCut{};
}

std::optional<KernelRun> allgatherByKernel(const Collective& call, int rank, int size) {
  const Tensors& inputs = call.input().list();
  const TensorLists& lists = call.output().lists;
  if (inputs.size() != 1 || lists.size() != 1 || lists[0].size() != size_t(size))
    return std::nullopt;
  const Tensors& outputs = lists[0];
  const bool isUneven = !areAlike(outputs);
  if (isUneven ? outputs[size_t(rank)].numel() != inputs[0].numel()
               : !isListFor(lists, inputs[0], size))
    return std::nullopt;
  const auto launch = [=, what = call.output().what](PeerCollectives& peers,
                                                     const PeerCollectives::Tensors& plain,
                                                     Deadline deadline) {
    checkApart(outputs, what);
    if (!isUneven) return peers.move({.name = "all_gather"}, plain, -1, deadline);
    return peers.exchange({.name = "all_gather of several sizes"}, plain,
                          {bytesOfEach(inputs), bytesOfEach(outputs)}, deadline);
  };
  return KernelRun{
      .launch = launch, .count = isUneven ? 0 : inputs[0].numel(), .hasSplits = isUneven};
}

constexpr CollectiveKind kAllgather{c10d::OpType::ALLGATHER, "all_gather", allgatherOnHost,
                                    cutAllgather, allgatherByKernel};

// all_gather_into_tensor.

HostRun allgatherBaseOnHost(const Collective& call, const Group& group) {
  const char* const name = call.kind->name;
  const at::Tensor &input = call.input().tensor(), &output = call.output().tensor();
  const int size = group.extent();
  checkOutput(output, call.output().what);
  throwIfError(checkTensor(input, call.input().what));
  checkSameType(output, input, name);
  const int parts =
      partsIn(output, input, size,
              "all_gather_into_tensor: the output " + sizesOf(output) + " must hold " +
                  std::to_string(size) + " times the input " + sizesOf(input));
  const Flat out(output);
  Flat in(input);
  if (group.rank() < parts)
    in = inputsBeside(call.input().list(), partsOf(out.place(), parts), group.rank())[0];
  return [in = std::move(in), out, parts, dtype = typeOf(input, name), timeout = call.timeout](
             Group& series, InputFeed* feed) {
    Status status = allgather(series, in.bytes(), partsOf(out.bytes(), parts), dtype,
                              Deadline::after(timeout), feed);
    if (status.ok()) out.copyBack();
    return status;
  };
}

InputCut cutAllgatherBase(const Collective& call, int) { return cutPieces(call.input().tensor()); }

std::optional<KernelRun> allgatherBaseByKernel(const Collective& call, int, int size) {
  const at::Tensor &input = call.input().tensor(), &output = call.output().tensor();
  if (!output.defined() || !input.defined() || output.numel() != input.numel() * size)
    return std::nullopt;
  const auto launch = [output, what = call.output().what](PeerCollectives& peers,
                                                          const PeerCollectives::Tensors& plain,
                                                          Deadline deadline) {
    refuseOwnOverlap(output, what);
    return peers.move({.name = "all_gather"}, plain, -1, deadline);
  };
  return KernelRun{.launch = launch, .count = input.numel()};
}

constexpr CollectiveKind kAllgatherBase{
    .type = c10d::OpType::_ALLGATHER_BASE,
    .name = "all_gather_into_tensor",
    .onHost = allgatherBaseOnHost,
    .cut = cutAllgatherBase,
    .byKernel = allgatherBaseByKernel,
    .event = "_all_gather_base",
};

// gather.

// Checks the lists of a rank that is not the root.
void checkNone(const TensorLists& lists, const char* operation) {
  for (const Tensors& list : lists) {
    if (!list.empty()) refuse(std::string(operation) + ": only the root has a list of tensors");
  }
}

bool areEmpty(const TensorLists& lists) {
  return std::ranges::all_of(lists, [](const Tensors& list) { return list.empty(); });
}

HostRun gatherOnHost(const Collective& call, const Group& group) {
  const char* const name = call.kind->name;
  const at::Tensor& input = onlyTensor(call.input().list(), name);
  throwIfError(checkTensor(input, call.input().what));
  const int to = rootOf(call.root, 0, group.extent(), name);
  Tensors results;
  if (to == group.rank()) {
    results = onlyList(call.output().lists, name);
    checkOnePerRank(results, input, group.extent(), name, "output");
    checkApart(results, call.output().what);
  } else {
    checkNone(call.output().lists, name);
  }
  std::vector<Flat> out = flatten(results);
  Flat in = inputsBeside(call.input().list(), placesOf(out), group.rank())[0];
  return [to, in = std::move(in), out = std::move(out), dtype = typeOf(input, name),
          parts = size_t(group.extent()), timeout = call.timeout](Group& series, InputFeed* feed) {
    Status status =
        gather(series, in.bytes(), spansOf(out), dtype, to, Deadline::after(timeout), feed, parts);
    copyBack(status, out);
    return status;
  };
}

std::optional<KernelRun> gatherByKernel(const Collective& call, int rank, int size) {
  const int root = int(call.root);
  const Tensors& inputs = call.input().list();
  if (inputs.size() != 1 || !isRoot(call.root, 0, size)) return std::nullopt;
  const TensorLists& lists = call.output().lists;
  if (root == rank ? !isListFor(lists, inputs[0], size) : !areEmpty(lists)) return std::nullopt;
  const auto launch = [outputs = call.written(), what = call.output().what, root](
                          PeerCollectives& peers, const PeerCollectives::Tensors& plain,
                          Deadline deadline) {
    checkApart(outputs, what);
    return peers.move({.name = "gather", .isToRoot = true}, plain, root, deadline);
  };
  return KernelRun{.launch = launch, .count = inputs[0].numel(), .root = root};
}

constexpr CollectiveKind kGather{c10d::OpType::GATHER, "gather", gatherOnHost, cutBroadcast,
                                 gatherByKernel};

// scatter.

HostRun scatterOnHost(const Collective& call, const Group& group) {
  const char* const name = call.kind->name;
  const at::Tensor& output = onlyTensor(call.output().list(), name);
  checkOutput(output, call.output().what);
  const int from = rootOf(call.root, 0, group.extent(), name);
  std::vector<Flat> in;
  if (from == group.rank()) {
    const Tensors& inputs = onlyList(call.input().lists, name);
    checkOnePerRank(inputs, output, group.extent(), name, "input");
    in = flatten(inputs);
  } else {
    checkNone(call.input().lists, name);
  }
  Flat out = outputBeside(output, in);
  return [from, out = std::move(out), in = std::move(in), dtype = typeOf(output, name),
          parts = size_t(group.extent()), timeout = call.timeout](Group& series, InputFeed* feed) {
    const std::vector<Span> inputs = spansOf(in);
    Status status = scatter(series, std::vector<ConstSpan>(inputs.begin(), inputs.end()),
                            out.bytes(), dtype, from, Deadline::after(timeout), feed, parts);
    if (status.ok()) out.copyBack();
    return status;
  };
}

InputCut cutScatter(const Collective& call, int size) {
  const Tensors& outputs = call.output().list();
  return outputs.size() == 1 ? cutPieces(outputs[0], size_t(size)) : InputCut{};
}

std::optional<KernelRun> scatterByKernel(const Collective& call, int rank, int size) {
  const int root = int(call.root);
  const Tensors& outputs = call.output().list();
  if (outputs.size() != 1 || !isRoot(call.root, 0, size)) return std::nullopt;
  const TensorLists& lists = call.input().lists;
  if (root == rank ? !isListFor(lists, outputs[0], size) : !areEmpty(lists)) return std::nullopt;
  const auto launch = [output = outputs[0], what = call.output().what, root](
                          PeerCollectives& peers, const PeerCollectives::Tensors& plain,
                          Deadline deadline) {
    refuseOwnOverlap(output, what);
    return peers.move({.name = "scatter", .isPerRank = true, .isFromRoot = true}, plain, root,
                      deadline);
  };
  return KernelRun{.launch = launch, .parts = size, .count = outputs[0].numel(), .root = root};
}

constexpr CollectiveKind kScatter{
    .type = c10d::OpType::SCATTER,
    .name = "scatter",
    .onHost = scatterOnHost,
    .cut = cutScatter,
    .byKernel = scatterByKernel,
    .hasInputLists = true,
};

}  // namespace

Collective broadcastCall(const Tensors& tensors, int rank, const c10d::BroadcastOptions& opts) {
  return {.kind = &kBroadcast,
          .given = {tensors, opts.rootRank == rank ? Use::kInput : Use::kOutput,
                    "the tensor of broadcast"},
          .root = opts.rootRank,
          .rootTensor = opts.rootTensor,
          .timeout = opts.timeout,
          .isAsync = opts.asyncOp};
}

Collective allgatherCall(const TensorLists& outputs, const Tensors& inputs,
                         const c10d::AllgatherOptions& opts) {
  return {.kind = &kAllgather,
          .given = {inputs, Use::kInput, "the input of all_gather"},
          .result = {outputs, Use::kOutput, "an output of all_gather"},
          .timeout = opts.timeout,
          .isAsync = opts.asyncOp};
}

Collective allgatherBaseCall(const at::Tensor& output, const at::Tensor& input,
                             const c10d::AllgatherOptions& opts) {
  return {.kind = &kAllgatherBase,
          .given = {input, Use::kInput, "the input of all_gather_into_tensor"},
          .result = {output, Use::kOutput, "the output of all_gather_into_tensor"},
          .timeout = opts.timeout,
          .isAsync = opts.asyncOp};
}

Collective gatherCall(const TensorLists& outputs, const Tensors& inputs,
                      const c10d::GatherOptions& opts) {
  return {.kind = &kGather,
          .given = {inputs, Use::kInput, "the input of gather"},
          .result = {outputs, Use::kOutput, "an output of gather"},
          .root = opts.rootRank,
          .timeout = opts.timeout,
          .isAsync = opts.asyncOp};
}

Collective scatterCall(const Tensors& outputs, const TensorLists& inputs,
                       const c10d::ScatterOptions& opts) {
  return {.kind = &kScatter,
          .given = {inputs, Use::kInput, "an input of scatter"},
          .result = {outputs, Use::kOutput, "the output of scatter"},
          .root = opts.rootRank,
          .timeout = opts.timeout,
          .isAsync = opts.asyncOp};
}

}  // namespace mooncake
