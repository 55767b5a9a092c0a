#include "backend/experts/ep_tensors.h"

#include <algorithm>

#include <c10/util/Exception.h>

#include "backend/device/staging_streams.h"

namespace mooncake {
namespace {

// "[2, any]": a negative size means any size.
std::string textOf(at::IntArrayRef sizes) {
  std::string text = "[";
  for (const int64_t size : sizes) {
    text += text.size() > 1 ? ", " : "";
    text += size < 0 ? "any" : std::to_string(size);
  }
  return text + "]";
}

template <typename Number>
Result<std::vector<int32_t>> narrow(const at::Tensor& topk, int numExperts) {
  std::vector<int32_t> chosen(size_t(topk.numel()));
  const Number* given = topk.const_data_ptr<Number>();
  for (size_t i = 0; i < chosen.size(); ++i) {
    if (given[i] < -1 || given[i] >= numExperts) {
      return Error{ErrorCode::kInvalidArgument,
                   "topk_idx: token " + std::to_string(i / size_t(topk.size(1))) +
                       " chooses expert " + std::to_string(given[i]) + " of " +
                       std::to_string(numExperts) + ": -1 stands for none"};
    }
    chosen[i] = int32_t(given[i]);
  }
  return chosen;
}

}  // namespace

std::string nameOf(at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }

void requireDevice(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK_VALUE(tensor.is_cpu() || isStaged(tensor.device()), what, " is on ", tensor.device(),
                    ": a buffer takes tensors of the CPU, and of devices with streams");
}

void requireTensor(const at::Tensor& tensor, const char* what, const c10::Device& device,
                   at::ScalarType dtype, std::initializer_list<int64_t> sizes) {
  TORCH_CHECK_VALUE(tensor.device() == device, what, " is on ", tensor.device(),
                    ", and the call is on ", device, ": give tensors of one device");
  TORCH_CHECK_VALUE(tensor.scalar_type() == dtype, what, " is ", nameOf(tensor.scalar_type()),
                    ", expected ", nameOf(dtype));
  const bool fits = std::ranges::equal(
      tensor.sizes(), sizes, [](int64_t size, int64_t due) { return due < 0 || size == due; });
  TORCH_CHECK_VALUE(fits, what, " has the sizes ", textOf(tensor.sizes()), ", expected ",
                    textOf(sizes));
  TORCH_CHECK_VALUE(tensor.is_contiguous(), what, " is not contiguous: call .contiguous() on it");
}

void requireChoices(const at::Tensor& topk, const c10::Device& device, int64_t tokens) {
  const bool isWide = topk.scalar_type() == at::kLong;
  requireTensor(topk, "topk_idx", device, isWide ? at::kLong : at::kInt, {tokens, -1});
}

void requireMask(const at::Tensor& activeRanks, const c10::Device& device, int size) {
  requireTensor(activeRanks, "active_ranks", device, at::kInt, {-1});
  TORCH_CHECK_VALUE(activeRanks.numel() >= size, "active_ranks has ", activeRanks.numel(),
                    " elements for ", size, " ranks");
}

Result<std::vector<int32_t>> chosenExperts(const at::Tensor& topk, int numExperts) {
  return topk.scalar_type() == at::kLong ? narrow<int64_t>(topk, numExperts)
                                         : narrow<int32_t>(topk, numExperts);
}

GroupRanks maskOf(const at::Tensor& activeRanks, int size) {
  GroupRanks mask;
  const int32_t* given = activeRanks.const_data_ptr<int32_t>();
  for (int r = 0; r < size; ++r) {
    if (given[r] != 0) mask.add(r);
  }
  return mask;
}

void clearOthers(const at::Tensor& activeRanks, int size, const GroupRanks& participants) {
  int32_t* shown = activeRanks.mutable_data_ptr<int32_t>();
  for (int r = 0; r < size; ++r) {
    if (!participants.contains(r)) shown[r] = 0;
  }
}

at::Tensor newResult(BlockCache& cache, at::IntArrayRef sizes, at::ScalarType dtype) {
  constexpr size_t kLeastBytes = size_t(1) << 20;
  const size_t bytes = size_t(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  if (bytes < kLeastBytes) return at::empty(sizes, dtype);
  auto block = cache.take(bytes);
  TORCH_CHECK_WITH(OutOfMemoryError, block, "no memory for a result of ", bytes, " bytes");
  std::byte* const data = block.get();
  return at::from_blob(
      data, sizes, [block = std::move(block)](void*) mutable { block.reset(); }, dtype);
}

}  // namespace mooncake
