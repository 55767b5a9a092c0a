#include "backend/arguments.h"

#include <algorithm>

#include <ATen/MemoryOverlap.h>

namespace mooncake {

void refuse(const std::string& message) { throwError({ErrorCode::kInvalidArgument, message}); }

namespace {

[[noreturn]] void refuseIn(const char* operation, const std::string& message) {
  refuse(std::string(operation) + ": " + message);
}

}  // namespace

DType typeOf(const at::Tensor& tensor, const char* operation) {
  const Result<DType> dtype = dtypeOf(tensor);
  if (!dtype.ok()) refuseIn(operation, dtype.error().message);
  return *dtype;
}

ReduceKind kindOf(const c10d::ReduceOp& op, const char* operation) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceKind::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceKind::kAvg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceKind::kProduct;
    case c10d::ReduceOp::MIN:
      return ReduceKind::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceKind::kMax;
    case c10d::ReduceOp::BAND:
      return ReduceKind::kBitAnd;
    case c10d::ReduceOp::BOR:
      return ReduceKind::kBitOr;
    case c10d::ReduceOp::BXOR:
      return ReduceKind::kBitXor;
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceKind::kPremulSum;
    default:
      refuseIn(operation, "there is no reduction with the number " + std::to_string(int(op.op_)));
  }
}

Reduction reductionOf(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* operation) {
  const Reduction reduction{typeOf(tensor, operation), kindOf(op, operation)};
  const Status possible = checkReduction(reduction);
  if (!possible.ok()) refuseIn(operation, possible.error().message);
  return reduction;
}

namespace {

at::Scalar factorOf(const c10d::ReduceOp& op, const char* operation) {
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (!supplement)
    refuseIn(operation, "PREMUL_SUM has no factor: make it with _make_nccl_premul_sum");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item()
                                             : at::Scalar(supplement->double_factor);
}

}  // namespace

Flat premultiplied(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* operation) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return Flat(tensor);
  const at::Scalar factor = factorOf(op, operation);
  if (factor.isComplex() && !tensor.is_complex())
    refuseIn(operation, "PREMUL_SUM of " + std::string(at::toString(tensor.scalar_type())) +
                            " with a complex factor");
  const at::NoGradGuard plain;
  return Flat(tensor, tensor.contiguous().mul(factor));
}

std::string sizesOf(const at::Tensor& tensor) { return c10::str(tensor.sizes()); }

void checkSameType(const at::Tensor& output, const at::Tensor& input, const char* operation) {
  if (output.scalar_type() != input.scalar_type()) {
    refuseIn(operation, std::string("input and output differ in type: ") +
                            at::toString(input.scalar_type()) + " and " +
                            at::toString(output.scalar_type()));
  }
}

void checkOutput(const at::Tensor& tensor, const char* what) {
  throwIfError(checkTensor(tensor, what));
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
    refuse(std::string(what) + " has several elements in one place: use clone()");
}

void checkUsed(const at::Tensor& tensor, bool isWritten, const char* what) {
  isWritten ? checkOutput(tensor, what) : throwIfError(checkTensor(tensor, what));
}

namespace {

std::string roleIn(const char* operation, const char* role) {
  return std::string("an ") + role + " of " + operation;
}

void checkList(const std::vector<at::Tensor>& tensors, const at::Tensor& like, int size,
               const char* operation, const char* role) {
  if (tensors.size() != size_t(size)) {
    refuse(std::string(operation) + " needs one " + role + " tensor for each of the " +
           std::to_string(size) + " ranks, not " + std::to_string(tensors.size()));
  }
  for (const at::Tensor& tensor : tensors) {
    throwIfError(checkTensor(tensor, roleIn(operation, role).c_str()));
    checkSameType(tensor, like, operation);
  }
}

}  // namespace

void checkOnePerRank(const std::vector<at::Tensor>& tensors, const at::Tensor& like, int size,
                     const char* operation, const char* role) {
  checkList(tensors, like, size, operation, role);
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() != like.numel()) {
      refuse(roleIn(operation, role) + " has the shape " + sizesOf(tensor) +
             ", the other side's tensor " + sizesOf(like));
    }
  }
}

void checkEachRank(const std::vector<at::Tensor>& tensors, const at::Tensor& own, int rank,
                   int size, const char* operation, const char* role) {
  checkList(tensors, own, size, operation, role);
  const at::Tensor& ours = tensors[size_t(rank)];
  if (ours.numel() != own.numel()) {
    refuse(roleIn(operation, role) + ", the one of this rank " + std::to_string(rank) +
           ", has the shape " + sizesOf(ours) + ", the other side's tensor " + sizesOf(own));
  }
}

bool areAlike(const std::vector<at::Tensor>& tensors) {
  return std::ranges::all_of(
      tensors, [&](const at::Tensor& tensor) { return tensor.numel() == tensors[0].numel(); });
}

void checkApart(const std::vector<at::Tensor>& outputs, const char* operation) {
  std::vector<std::span<std::byte>> places;
  for (const at::Tensor& output : outputs) {
    checkOutput(output, operation);
    if (output.numel() == 0) continue;
    const std::span<std::byte> bytes = bytesOf(output);
    // Columns of a matrix lie between each other and share nothing: the first element stands for
    // such a tensor.
    places.push_back(output.is_contiguous() ? bytes : bytes.first(output.itemsize()));
  }
  std::ranges::sort(places, {}, [](std::span<std::byte> place) { return place.data(); });
  for (size_t i = 1; i < places.size(); ++i) {
    if (places[i - 1].data() + places[i - 1].size() > places[i].data())
      refuse(std::string(operation) + ": two of the outputs share memory");
  }
}

}  // namespace mooncake
