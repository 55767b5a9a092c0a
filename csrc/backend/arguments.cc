#include "backend/arguments.h"

#include <algorithm>
#include <numeric>

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

bool isFactorOnDevice(const c10d::ReduceOp& op) {
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  return supplement && supplement->tensor_factor.defined() && !supplement->tensor_factor.is_cpu();
}

at::Scalar factorOf(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* operation) {
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (!supplement)
    refuseIn(operation, "PREMUL_SUM has no factor: make it with _make_nccl_premul_sum");
  const at::Scalar factor = supplement->tensor_factor.defined()
                                ? supplement->tensor_factor.item()
                                : at::Scalar(supplement->double_factor);
  if (factor.isComplex() && !tensor.is_complex())
    refuseIn(operation, "PREMUL_SUM of " + std::string(at::toString(tensor.scalar_type())) +
                            " with a complex factor");
  if (!at::canCast(at::result_type(tensor, factor), tensor.scalar_type())) {
    refuseIn(operation, "PREMUL_SUM of " + std::string(at::toString(tensor.scalar_type())) +
                            " with a factor that is no integer type: give the factor as a tensor "
                            "of the same type");
  }
  return factor;
}

Flat premultiplied(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* operation) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return Flat(tensor);
  return Flat::scaled(tensor, factorOf(tensor, op, operation));
}

std::vector<Flat> premultipliedAll(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op,
                                   const char* operation) {
  std::vector<Flat> flats;
  for (const at::Tensor& tensor : tensors) flats.push_back(premultiplied(tensor, op, operation));
  return flats;
}

const at::Tensor& onlyTensor(const std::vector<at::Tensor>& tensors, const char* operation) {
  if (tensors.size() != 1) {
    refuse(std::string(operation) + " takes one tensor per rank, not " +
           std::to_string(tensors.size()));
  }
  return tensors[0];
}

const std::vector<at::Tensor>& onlyList(const std::vector<std::vector<at::Tensor>>& lists,
                                        const char* operation) {
  if (lists.size() != 1)
    refuse(std::string(operation) + " takes one list per rank, not " +
           std::to_string(lists.size()));
  return lists[0];
}

bool isRoot(int64_t root, int64_t rootTensor, int size) {
  return root >= 0 && root < size && rootTensor == 0;
}

int rootOf(int64_t root, int64_t rootTensor, int size, const char* operation) {
  if (root < 0 || root >= size)
    refuseIn(operation,
             "root " + std::to_string(root) + " is not in a group of " + std::to_string(size));
  if (rootTensor != 0)
    refuseIn(operation,
             "root tensor " + std::to_string(rootTensor) + ": each rank has one tensor, number 0");
  return static_cast<int>(root);
}

bool isListFor(const std::vector<std::vector<at::Tensor>>& lists, const at::Tensor& like,
               int size) {
  return lists.size() == 1 && lists[0].size() == size_t(size) && areAlike(lists[0]) &&
         lists[0][0].numel() == like.numel();
}

std::vector<size_t> bytesOfEach(const std::vector<at::Tensor>& tensors) {
  std::vector<size_t> bytes;
  for (const at::Tensor& tensor : tensors) bytes.push_back(tensor.nbytes());
  return bytes;
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
  refuseOwnOverlap(tensor, what);
}

int partsIn(const at::Tensor& whole, const at::Tensor& part, int size, const std::string& message) {
  const int64_t all = whole.numel(), each = part.numel();
  if (all == each * size) return size;
  if (all == 0 || each == 0 || all % each != 0 || all / each > size) refuse(message);
  return static_cast<int>(all / each);
}

void refuseOwnOverlap(const at::Tensor& tensor, const char* what) {
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

void checkList(const std::vector<at::Tensor>& tensors, const at::Tensor& like,
               const char* operation, const char* role) {
  for (const at::Tensor& tensor : tensors) {
    throwIfError(checkTensor(tensor, roleIn(operation, role).c_str()));
    checkSameType(tensor, like, operation);
  }
}

void checkNumber(const std::vector<at::Tensor>& tensors, int size, bool isRight,
                 const char* operation, const char* role) {
  if (isRight) return;
  refuse(std::string(operation) + " needs one " + role + " tensor for each of the " +
         std::to_string(size) + " ranks, not " + std::to_string(tensors.size()));
}

}  // namespace

void checkOnePerRank(const std::vector<at::Tensor>& tensors, const at::Tensor& like, int size,
                     const char* operation, const char* role) {
  checkNumber(tensors, size, tensors.size() == size_t(size), operation, role);
  checkList(tensors, like, operation, role);
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() != like.numel()) {
      refuse(roleIn(operation, role) + " has the shape " + sizesOf(tensor) +
             ", the other side's tensor " + sizesOf(like));
    }
  }
}

void checkEachRank(const std::vector<at::Tensor>& tensors, const at::Tensor& own, int rank,
                   int size, const char* operation, const char* role) {
  const size_t parts = tensors.size();
  checkNumber(tensors, size, parts > 0 && parts <= size_t(size), operation, role);
  if (parts < size_t(size)) return checkOnePerRank(tensors, own, int(parts), operation, role);
  checkList(tensors, own, operation, role);
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

std::vector<int64_t> elementsPerRank(const at::Tensor& tensor, const std::vector<int64_t>& splits,
                                     int size, const char* what) {
  const int64_t rows = tensor.dim() ? tensor.size(0) : 0;
  if (splits.empty()) {
    if (tensor.dim() == 0 || rows % size != 0) {
      refuse(std::string("all_to_all_single: the first dimension of the ") + what + " " +
             sizesOf(tensor) + " cannot be divided by the group's size " + std::to_string(size));
    }
    return std::vector<int64_t>(size, tensor.numel() / size);
  }
  if (splits.size() != size_t(size)) {
    refuse(std::string("all_to_all_single: ") + std::to_string(splits.size()) + " " + what +
           " splits for a group of " + std::to_string(size));
  }
  int64_t sum = 0;
  for (const int64_t split : splits) {
    if (split < 0)
      refuse(std::string("all_to_all_single: a negative ") + what +
             " split: " + std::to_string(split));
    if (__builtin_add_overflow(sum, split, &sum))
      refuse(std::string("all_to_all_single: the ") + what + " splits add up to more than 2**63");
  }
  if (sum != rows) {
    refuse(std::string("all_to_all_single: the ") + what + " splits add up to " +
           std::to_string(sum) + ", the first dimension is " + std::to_string(rows));
  }
  const int64_t row = rows ? tensor.numel() / rows : 0;
  std::vector<int64_t> elements;
  for (const int64_t split : splits) elements.push_back(split * row);
  return elements;
}

namespace {

struct Place {
  ConstSpan extent;
  const at::Tensor* tensor;
};

// Marks the tensor's elements, which lie at multiples of `unit` bytes from `begin`. False: one was
// marked before.
bool mark(std::vector<bool>& marks, const at::Tensor& tensor, const std::byte* begin, size_t unit) {
  const size_t width = tensor.itemsize() / unit;
  std::vector<int64_t> index(size_t(tensor.dim()), 0);
  const auto* first = static_cast<const std::byte*>(tensor.const_data_ptr());
  size_t at = size_t(first - begin) / unit;
  for (int64_t left = tensor.numel(); left > 0; --left) {
    for (size_t i = at; i < at + width; ++i) {
      if (marks[i]) return false;
      marks[i] = true;
    }
    for (int64_t d = tensor.dim() - 1; d >= 0; --d) {
      const size_t step = size_t(tensor.stride(d)) * width;
      if (++index[size_t(d)] < tensor.size(d)) {
        at += step;
        break;
      }
      at -= step * size_t(tensor.size(d) - 1);
      index[size_t(d)] = 0;
    }
  }
  return true;
}

// True if two of the tensors have an element in the same place. Their extents overlap, as extents
// of a matrix's columns do. Costs about as much as a copy of the tensors, which is made anyway.
bool shareElements(std::span<const Place> places) {
  const std::byte* begin = places.front().extent.data();
  const std::byte* end = begin;
  size_t unit = places.front().tensor->itemsize();
  for (const Place& place : places) {
    end = std::max(end, place.extent.data() + place.extent.size());
    unit = std::gcd(unit, size_t(place.extent.data() - begin));
    unit = std::gcd(unit, size_t(place.tensor->itemsize()));
  }
  std::vector<bool> marks(size_t(end - begin) / unit);
  return !std::ranges::all_of(
      places, [&](const Place& place) { return mark(marks, *place.tensor, begin, unit); });
}

}  // namespace

void checkApart(const std::vector<at::Tensor>& outputs, const char* operation) {
  std::vector<Place> places;
  for (const at::Tensor& output : outputs) {
    refuseOwnOverlap(output, operation);
    if (output.numel() > 0) places.push_back({extentOf(output), &output});
  }
  std::ranges::sort(places, {}, [](const Place& place) { return place.extent.data(); });
  const auto refuseShared = [&] {
    refuse(std::string(operation) + ": two of the outputs share memory");
  };
  // One run of places: each begins before an earlier place of the run has ended.
  for (size_t first = 0, next = 0; first < places.size(); first = next) {
    const std::byte* end = nullptr;
    bool isContiguous = true;
    do {
      const Place& place = places[next++];
      end = std::max(end, place.extent.data() + place.extent.size());
      isContiguous = isContiguous && place.tensor->is_contiguous();
    } while (next < places.size() && places[next].extent.data() < end);
    if (next - first == 1) continue;
    if (isContiguous || shareElements(std::span(places).subspan(first, next - first)))
      refuseShared();
  }
}

}  // namespace mooncake
