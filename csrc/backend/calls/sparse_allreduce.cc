// The sum of sparse tensors. The ranks exchange their indices and values, and every rank adds all
// of them in rank order. Two operations with one verdict: the first exchanges shapes and sizes, the
// second the data. A rank that is lost in between contributes nothing.
#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>

#include "backend/arguments.h"
#include "backend/calls/collective_calls.h"
#include "collectives/collectives.h"
#include "group/call_of_several.h"

namespace mooncake {
namespace {

constexpr int kMostDims = 16;

struct Shape {
  int64_t sparseDims = 0;
  int64_t denseDims = 0;
  int64_t sizes[kMostDims] = {};
  bool operator==(const Shape&) const = default;
};

struct Extent {
  Shape shape;
  int64_t elements = 0;  // number of elements that are stored
};

std::string describe(const Shape& shape) {
  return c10::str(at::IntArrayRef(shape.sizes, size_t(shape.sparseDims + shape.denseDims)), ", ",
                  shape.sparseDims, " of them sparse");
}

class SparseSum {
 public:
  SparseSum(Group& group, const at::Tensor& tensor, Deadline deadline)
      : group_(group), tensor_(tensor), own_(tensor.coalesce()), deadline_(deadline) {}

  Status run() {
    CallOfSeveral call(group_);
    MOONCAKE_TRY(exchangeExtents(call));
    call.last();
    MOONCAKE_TRY(exchangeData());
    // Half precision is rounded once, at the end, as in sums of dense tensors.
    const at::ScalarType type = own_.scalar_type();
    const at::ScalarType wide = at::isReducedFloatingType(type) ? at::kFloat : type;
    at::Tensor sum;
    for (const int r : group_.lastView->active) {
      const at::Tensor theirs = tensorOf(r).to(wide);
      sum = sum.defined() ? sum + theirs : theirs;
    }
    tensor_.copy_(sum.coalesce().to(type));
    return {};
  }

 private:
  Status exchangeExtents(CallOfSeveral& call) {
    Extent mine;
    mine.shape.sparseDims = own_.sparse_dim();
    mine.shape.denseDims = own_.dense_dim();
    std::ranges::copy(own_.sizes(), mine.shape.sizes);
    mine.elements = own_._nnz();
    extents_.resize(size_t(group_.size()));
    std::vector<Span> outputs;
    for (Extent& extent : extents_)
      outputs.push_back(std::as_writable_bytes(std::span(&extent, 1)));
    MOONCAKE_TRY(
        allgather(group_, std::as_bytes(std::span(&mine, 1)), outputs, DType::kInt64, deadline_));
    const int first = group_.lastView->active.front();
    for (const int r : group_.lastView->active) {
      if (extents_[size_t(r)].shape == extents_[size_t(first)].shape) continue;
      call.endsHere();
      return {ErrorCode::kMismatch,
              "all_reduce of sparse tensors: " + group_.nameRank(first) + " has the sizes " +
                  describe(extents_[size_t(first)].shape) + ", " + group_.nameRank(r) + " " +
                  describe(extents_[size_t(r)].shape)};
    }
    return {};
  }

  Status exchangeData() {
    std::vector<ConstSpan> inputs;
    std::vector<Span> outputs;
    const at::Tensor indices = own_._indices().contiguous(), values = own_._values().contiguous();
    std::vector<std::byte> mine(indices.nbytes() + values.nbytes());
    std::memcpy(mine.data(), indices.data_ptr(), indices.nbytes());
    std::memcpy(mine.data() + indices.nbytes(), values.data_ptr(), values.nbytes());
    for (const Extent& extent : extents_) {
      inputs.push_back(mine);
      data_.emplace_back(indexBytes(extent) + valueBytes(extent));
    }
    for (auto& data : data_) outputs.push_back(data);
    return alltoall(group_, inputs, outputs, *dtypeOf(own_), deadline_);
  }

  size_t indexBytes(const Extent& extent) const {
    return size_t(own_.sparse_dim() * extent.elements) * sizeof(int64_t);
  }
  size_t valueBytes(const Extent& extent) const {
    int64_t each = own_.element_size();
    for (int64_t dim = own_.sparse_dim(); dim < own_.dim(); ++dim) each *= own_.size(dim);
    return size_t(extent.elements * each);
  }

  at::Tensor tensorOf(int rank) {
    const Extent& extent = extents_[size_t(rank)];
    std::byte* data = data_[size_t(rank)].data();
    std::vector<int64_t> sizes{extent.elements};
    for (int64_t dim = own_.sparse_dim(); dim < own_.dim(); ++dim) sizes.push_back(own_.size(dim));
    const at::Tensor indices = at::empty({own_.sparse_dim(), extent.elements}, at::kLong);
    const at::Tensor values = at::empty(sizes, own_._values().options());
    std::memcpy(indices.data_ptr(), data, indices.nbytes());
    std::memcpy(values.data_ptr(), data + indices.nbytes(), values.nbytes());
    return at::sparse_coo_tensor(indices, values, own_.sizes(), own_.options());
  }

  Group& group_;
  const at::Tensor tensor_;
  const at::Tensor own_;
  const Deadline deadline_;
  std::vector<Extent> extents_;               // by rank
  std::vector<std::vector<std::byte>> data_;  // by rank: indices, values
};

HostRun sumOnHost(const Collective& call, const Group&) {
  const at::Tensor& tensor = call.input().tensor();
  if (!tensor.is_cpu()) throwIfError(checkTensor(tensor, call.input().what));
  if (call.op->op_ != c10d::ReduceOp::SUM)
    refuse("all_reduce of a sparse tensor: only SUM is supported, not " +
           std::string(reduceName(kindOf(*call.op, "all_reduce"))));
  if (tensor.dim() > kMostDims)
    refuse("all_reduce of a sparse tensor of " + std::to_string(tensor.dim()) +
           " dimensions; the most is " + std::to_string(kMostDims));
  (void)reductionOf(tensor, *call.op, "all_reduce");
  return [tensor, timeout = call.timeout](Group& series, InputFeed*) {
    const PlainWrites plain(tensor);
    return SparseSum(series, tensor, Deadline::after(timeout)).run();
  };
}

constexpr CollectiveKind kSparseAllreduce{
    .type = c10d::OpType::_ALLREDUCE_SPARSE,
    .name = "all_reduce",
    .onHost = sumOnHost,
    .event = "sparse_all_reduce",
    .isInPlace = true,
    .isSparse = true,
};

}  // namespace

Collective sparseAllreduceCall(const at::Tensor& tensor, const c10d::AllreduceOptions& opts) {
  return {.kind = &kSparseAllreduce,
          .given = {tensor, Operand::Use::kInOut, "the sparse tensor of all_reduce"},
          .op = opts.reduceOp,
          .timeout = opts.timeout,
          .isAsync = opts.asyncOp};
}

}  // namespace mooncake
