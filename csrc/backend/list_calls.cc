// The calls of c10d that take lists of tensors: one for each rank, or several that go as one
// operation (coalesced).
#include <algorithm>
#include <cstring>

#include "backend/arguments.h"
#include "backend/mooncake_backend.h"
#include "collectives/buffers.h"

namespace mooncake {
namespace {

// The only list of this rank. c10d passes a list of lists, for backends with several devices.
const std::vector<at::Tensor>& onlyList(const std::vector<std::vector<at::Tensor>>& lists,
                                        const char* operation) {
  if (lists.size() != 1)
    refuse(std::string(operation) + " takes one list per rank, not " +
           std::to_string(lists.size()));
  return lists[0];
}

// Checks the lists of a rank that is not the root.
void checkNone(const std::vector<std::vector<at::Tensor>>& lists, const char* operation) {
  for (const auto& list : lists) {
    if (!list.empty()) refuse(std::string(operation) + ": only the root has a list of tensors");
  }
}

void checkAny(const std::vector<at::Tensor>& tensors, const char* operation) {
  if (tensors.empty()) refuse(std::string(operation) + " needs at least one tensor");
}

void checkSameNumber(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                     const char* operation) {
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

std::vector<Flat> givenAll(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op,
                           const char* operation) {
  std::vector<Flat> flats;
  for (const at::Tensor& tensor : tensors) flats.push_back(premultiplied(tensor, op, operation));
  return flats;
}

// True: the tensors are exchanged in slots, which cost the same for any number of tensors.
bool fit(const std::vector<Flat>& given, size_t most) {
  size_t bytes = 0;
  for (const Flat& flat : given) bytes += aligned(flat.place().size());
  return bytes <= most;
}

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
    rows.lengths = hashOn(rows.lengths, part.bytes().size());
  }
  const at::NoGradGuard plain;
  rows.data = at::zeros({int64_t(parts.size()), longest}, parts[0].tensor().scalar_type());
  for (size_t r = 0; r < parts.size(); ++r) {
    if (parts[r].bytes().empty()) continue;
    std::memcpy(rows.data[int64_t(r)].data_ptr(), parts[r].bytes().data(), parts[r].bytes().size());
  }
  return rows;
}

}  // namespace

MooncakeBackend::WorkPtr MooncakeBackend::gather(std::vector<std::vector<at::Tensor>>& outputs,
                                                 std::vector<at::Tensor>& inputs,
                                                 const c10d::GatherOptions& opts) {
  const at::Tensor& input = only(inputs, "gather");
  throwIfError(checkTensor(input, "the input of gather"));
  const int to = root(opts.rootRank, 0, "gather");
  std::vector<at::Tensor> results;
  if (to == rank_) {
    results = onlyList(outputs, "gather");
    checkOnePerRank(results, input, size_, "gather", "output");
    checkApart(results, "an output of gather");
  } else {
    checkNone(outputs, "gather");
  }
  std::vector<Flat> out = flatten(results);
  Flat in = inputsBeside(inputs, placesOf(out), rank_)[0];
  return submit(
      c10d::OpType::GATHER, inputs, std::move(results), opts.asyncOp,
      [this, to, in = std::move(in), out = std::move(out), dtype = typeOf(input, "gather"),
       timeout = effective(opts.timeout)](InputFeed* feed) {
        Status status = mooncake::gather(*group_, in.bytes(), spansOf(out), dtype, to,
                                         Deadline::after(timeout), feed);
        copyBack(status, out);
        return status;
      });
}

MooncakeBackend::WorkPtr MooncakeBackend::scatter(std::vector<at::Tensor>& outputs,
                                                  std::vector<std::vector<at::Tensor>>& inputs,
                                                  const c10d::ScatterOptions& opts) {
  const at::Tensor& output = only(outputs, "scatter");
  checkOutput(output, "the output of scatter");
  const int from = root(opts.rootRank, 0, "scatter");
  std::vector<Flat> in;
  if (from == rank_) {
    checkOnePerRank(onlyList(inputs, "scatter"), output, size_, "scatter", "input");
    in = flatten(inputs[0]);
  } else {
    checkNone(inputs, "scatter");
  }
  return submit(
      c10d::OpType::SCATTER, from == rank_ ? at::TensorList(inputs[0]) : at::TensorList(), outputs,
      opts.asyncOp,
      [this, from, out = outputBeside(output, in), in = std::move(in),
       dtype = typeOf(output, "scatter"), timeout = effective(opts.timeout)](InputFeed* feed) {
        const std::vector<Span> parts = spansOf(in);
        Status status =
            mooncake::scatter(*group_, std::vector<ConstSpan>(parts.begin(), parts.end()),
                              out.bytes(), dtype, from, Deadline::after(timeout), feed);
        if (status.ok()) out.copyBack();
        return status;
      });
}

MooncakeBackend::WorkPtr MooncakeBackend::reduce_scatter(
    std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = only(outputs, "reduce_scatter");
  checkOutput(output, "the output of reduce_scatter");
  checkEachRank(onlyList(inputs, "reduce_scatter"), output, rank_, size_, "reduce_scatter",
                "input");
  const Reduction reduction = reductionOf(output, opts.reduceOp, "reduce_scatter");
  std::vector<Flat> in = givenAll(inputs[0], opts.reduceOp, "reduce_scatter");
  if (!areAlike(inputs[0])) {
    return submit(c10d::OpType::REDUCE_SCATTER, inputs[0], outputs, opts.asyncOp,
                  [this, reduction, output, in = std::move(in), timeout = effective(opts.timeout)] {
                    const Rows rows = rowsOf(in);
                    const at::Tensor longest = at::empty_like(rows.data[0]);
                    const Buffer from{bytesOf(rows.data), reduction.dtype, rows.lengths};
                    const Buffer to{bytesOf(longest), reduction.dtype, rows.lengths};
                    Status status =
                        mooncake::reduceScatter(*group_, Buffers(&from, 1), Buffers(&to, 1),
                                                reduction.kind, Deadline::after(timeout));
                    if (status.ok()) Flat(output, longest.narrow(0, 0, output.numel())).copyBack();
                    return status;
                  });
  }
  Flat out = outputBeside(output, in);
  return submit(c10d::OpType::REDUCE_SCATTER, inputs[0], outputs, opts.asyncOp,
                [this, reduction, in = std::move(in), out = std::move(out),
                 timeout = effective(opts.timeout)](InputFeed* feed) {
                  std::vector<Buffer> parts;
                  for (const Flat& part : in) parts.push_back({part.bytes(), reduction.dtype});
                  const Buffer result{out.bytes(), reduction.dtype};
                  Status status =
                      mooncake::reduceScatter(*group_, parts, Buffers(&result, 1), reduction.kind,
                                              Deadline::after(timeout), feed);
                  if (status.ok()) out.copyBack();
                  return status;
                });
}

MooncakeBackend::WorkPtr MooncakeBackend::allreduce_coalesced(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return withinBatch([&]() -> WorkPtr {
    checkAny(tensors, "all_reduce_coalesced");
    for (const at::Tensor& tensor : tensors) {
      checkOutput(tensor, "a tensor of all_reduce_coalesced");
      reductionOf(tensor, opts.reduceOp, "all_reduce_coalesced");
    }
    std::vector<Flat> flats = givenAll(tensors, opts.reduceOp, "all_reduce_coalesced");
    keepApart(flats);
    const bool isShort = fit(flats, group_->eagerBytes());
    return submit(
        c10d::OpType::ALLREDUCE_COALESCED, tensors, tensors, opts.asyncOp,
        [this, list = FlatList(std::move(flats), 1, isShort),
         kind = kindOf(opts.reduceOp, "all_reduce_coalesced"), timeout = effective(opts.timeout)] {
          Status status =
              mooncake::allreduce(*group_, list.buffers(), kind, Deadline::after(timeout));
          if (status.ok()) list.copyBack();
          return status;
        });
  });
}

MooncakeBackend::WorkPtr MooncakeBackend::allgather_coalesced(
    std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& opts) {
  constexpr const char* kName = "all_gather_coalesced";
  checkAny(inputs, kName);
  if (outputs.size() != size_t(size_)) {
    refuse(std::string(kName) + " needs one list of outputs for each of the " +
           std::to_string(size_) + " ranks, not " + std::to_string(outputs.size()));
  }
  for (const at::Tensor& input : inputs)
    throwIfError(checkTensor(input, "an input of all_gather_coalesced"));
  std::vector<at::Tensor> results;
  for (const auto& list : outputs) {
    checkSameNumber(list, inputs, kName);
    for (size_t i = 0; i < list.size(); ++i) {
      checkOutput(list[i], "an output of all_gather_coalesced");
      checkTimes(list[i], inputs[i], 1, kName);
    }
    results.insert(results.end(), list.begin(), list.end());
  }
  checkApart(results, "an output of all_gather_coalesced");
  std::vector<std::vector<Flat>> out;
  std::vector<Span> places;
  for (const auto& list : outputs) {
    out.push_back(flatten(list));
    for (const Flat& flat : out.back()) places.push_back(flat.place());
  }
  std::vector<Flat> in = inputsBeside(inputs, places, rank_);
  const bool isShort = fit(in, mostGatheredInSlots(*group_, in.size()));
  std::vector<FlatList> lists;
  for (auto& flats : out) lists.emplace_back(std::move(flats), 1, isShort);
  return submit(c10d::OpType::ALLGATHER_COALESCED, inputs, std::move(results), opts.asyncOp,
                [this, in = FlatList(std::move(in), 1, isShort), lists = std::move(lists),
                 timeout = effective(opts.timeout)] {
                  std::vector<Span> parts;
                  for (const FlatList& list : lists) {
                    for (const Span part : list.rows()) parts.push_back(part);
                  }
                  Status status =
                      mooncake::allgather(*group_, in.buffers(), parts, Deadline::after(timeout));
                  for (const FlatList& list : lists) {
                    if (status.ok()) list.copyBack();
                  }
                  return status;
                });
}

MooncakeBackend::WorkPtr MooncakeBackend::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& opts) {
  return withinBatch([&]() -> WorkPtr {
    constexpr const char* kName = "all_gather_into_tensor_coalesced";
    checkSameNumber(outputs, inputs, kName);
    checkApart(outputs, "an output of all_gather_into_tensor_coalesced");
    for (size_t i = 0; i < inputs.size(); ++i) {
      throwIfError(checkTensor(inputs[i], "an input of all_gather_into_tensor_coalesced"));
      checkTimes(outputs[i], inputs[i], size_, kName);
    }
    std::vector<Flat> out = flatten(outputs);
    std::vector<Span> places;
    for (size_t r = 0; r < size_t(size_); ++r) {
      for (const Flat& flat : out) {
        const size_t each = flat.place().size() / size_t(size_);
        places.push_back(flat.place().subspan(r * each, each));
      }
    }
    std::vector<Flat> in = inputsBeside(inputs, places, rank_);
    const bool isShort = fit(in, mostGatheredInSlots(*group_, in.size()));
    return submit(
        c10d::OpType::ALLGATHER_COALESCED, inputs, outputs, opts.asyncOp,
        [this, in = FlatList(std::move(in), 1, isShort),
         out = FlatList(std::move(out), size_, isShort), timeout = effective(opts.timeout)] {
          Status status =
              mooncake::allgather(*group_, in.buffers(), out.rows(), Deadline::after(timeout));
          if (status.ok()) out.copyBack();
          return status;
        });
  });
}

MooncakeBackend::WorkPtr MooncakeBackend::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::ReduceScatterOptions& opts) {
  return withinBatch([&]() -> WorkPtr {
    constexpr const char* kName = "reduce_scatter_tensor_coalesced";
    checkSameNumber(outputs, inputs, kName);
    checkApart(outputs, "an output of reduce_scatter_tensor_coalesced");
    for (size_t i = 0; i < inputs.size(); ++i) {
      throwIfError(checkTensor(inputs[i], "an input of reduce_scatter_tensor_coalesced"));
      checkTimes(inputs[i], outputs[i], size_, kName);
      reductionOf(outputs[i], opts.reduceOp, kName);
    }
    std::vector<Flat> in = givenAll(inputs, opts.reduceOp, kName), out;
    for (const at::Tensor& output : outputs) out.push_back(outputBeside(output, in));
    const bool isShort = fit(in, group_->eagerBytes());
    return submit(c10d::OpType::COALESCED, inputs, outputs, opts.asyncOp,
                  [this, in = FlatList(std::move(in), size_, isShort),
                   out = FlatList(std::move(out), 1, isShort), kind = kindOf(opts.reduceOp, kName),
                   timeout = effective(opts.timeout)] {
                    Status status = mooncake::reduceScatter(*group_, in.buffers(), out.buffers(),
                                                            kind, Deadline::after(timeout));
                    if (status.ok()) out.copyBack();
                    return status;
                  });
  });
}

}  // namespace mooncake
