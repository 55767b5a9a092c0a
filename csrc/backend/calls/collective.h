#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backend/calls/input_cut.h"
#include "base/result.h"
#include "group/group.h"
#include "peers/peer_collectives.h"

namespace mooncake {

class InputFeed;
struct CollectiveKind;

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

// Tensors of a call that it uses alike, in lists as c10d gives them.
struct Operand {
  enum class Use { kInput, kOutput, kInOut };
  TensorLists lists{};
  Use use = Use::kInput;
  const char* what = "";  // one of the tensors, in errors

  Operand() = default;
  Operand(TensorLists given, Use usedAs, const char* name)
      : lists(std::move(given)), use(usedAs), what(name) {}
  Operand(Tensors list, Use usedAs, const char* name) : use(usedAs), what(name) {
    lists.push_back(std::move(list));
  }
  Operand(const at::Tensor& tensor, Use usedAs, const char* name)
      : Operand(Tensors(1, tensor), usedAs, name) {}

  bool isRead() const { return use != Use::kOutput; }
  bool isWritten() const { return use != Use::kInput; }
  // Where c10d gives one list, or one tensor.
  const Tensors& list() const { return lists.front(); }
  const at::Tensor& tensor() const { return lists.front().front(); }
  Tensors all() const;  // of all lists
  const at::Tensor* firstDefined() const;
};

// A collective that c10d has called, on tensors of any device: c10d's arguments, not checked yet.
// The functions in collective_calls.h make it. Host memory, stagings and kernels carry it out.
struct Collective {
  const CollectiveKind* kind = nullptr;
  Operand given{};   // the inputs; of a kind that is in place: all tensors
  Operand result{};  // the outputs; of a kind that is in place: none
  std::optional<c10d::ReduceOp> op{};
  int64_t root = 0;
  int64_t rootTensor = 0;
  std::vector<int64_t> inputSplits{}, outputSplits{};
  std::chrono::milliseconds timeout{};
  bool isAsync = true;

  const Operand& input() const { return given; }
  const Operand& output() const;
  Tensors read() const { return input().isRead() ? input().all() : Tensors(); }  // by this rank
  Tensors written() const { return output().isWritten() ? output().all() : Tensors(); }
  Tensors results() const { return output().all(); }  // of its work
  // The tensor that decides the call's device, on each rank; null: none is defined.
  const at::Tensor* leading() const;
  const at::Tensor& first() const;  // that is defined: there is one
  bool isPremultiplied() const { return op && *op == c10d::ReduceOp::PREMUL_SUM; }
};

// Runs a call on host memory, in the series that it falls into. With a feed, it takes its input as
// it comes.
using HostRun = std::function<Status(Group& series, InputFeed*)>;

// How kernels do a call.
struct KernelRun {
  // Enqueues the kernel. It gets the addresses of contiguous tensors. Throws.
  std::function<Result<uint64_t>(PeerCollectives&, const PeerCollectives::Tensors&, Deadline)>
      launch;
  int parts = 1;      // of the inputs of a rank that gives any; the same on all ranks
  int64_t count = 0;  // elements of a part
  int root = -1;      // without this rank the call fails; -1: any may be lost
  // Each rank has its own sizes, which may not fit the other ranks' sizes. `count` is not used.
  bool hasSplits = false;
};

// What one collective is, for each way to carry it out.
struct CollectiveKind {
  c10d::OpType type;
  const char* name;  // in Python
  // Checks the arguments (tensors of the CPU), and returns the function that runs the call.
  // Throws.
  HostRun (*onHost)(const Collective& call, const Group& group);
  // Which pieces of its input the call can take, on these tensors. Null: it takes no pieces.
  InputCut (*cut)(const Collective& call, int size) = nullptr;
  // nullopt: the call has to be staged, which also finds wrong arguments. That follows from arguments
  // which are equal on all ranks, unless they are wrong. Null: there is no kernel.
  std::optional<KernelRun> (*byKernel)(const Collective& call, int rank, int size) = nullptr;
  // In traces of torch's profiler: the name that torch's own backends use. Null: `name`.
  const char* event = nullptr;
  bool isInPlace = false;
  bool hasInputLists = false;  // of which only the root may have any: the outputs lead
  bool isSparse = false;
};

}  // namespace mooncake
