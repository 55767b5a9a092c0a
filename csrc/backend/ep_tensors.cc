#include "backend/ep_tensors.h"

#include <algorithm>
#include <cctype>

#include <c10/util/Exception.h>

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

// The dtype's name in Python.
std::string nameOf(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    default:
      break;
  }
  std::string name = at::toString(type);
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
  return name;
}

template <typename Number>
std::vector<int32_t> narrow(const at::Tensor& topk, int numExperts) {
  std::vector<int32_t> chosen(size_t(topk.numel()));
  const Number* given = topk.const_data_ptr<Number>();
  for (size_t i = 0; i < chosen.size(); ++i) {
    TORCH_CHECK_VALUE(given[i] >= -1 && given[i] < numExperts, "topk_idx: token ",
                      i / size_t(topk.size(1)), " chooses expert ", given[i], " of ", numExperts,
                      ": -1 stands for none");
    chosen[i] = int32_t(given[i]);
  }
  return chosen;
}

}  // namespace

void requireTensor(const at::Tensor& tensor, const char* what, at::ScalarType dtype,
                   std::initializer_list<int64_t> sizes) {
  TORCH_CHECK_VALUE(tensor.is_cpu(), what, " is on ", tensor.device(),
                    ": this buffer takes CPU tensors (staged=True copies those of a device)");
  TORCH_CHECK_VALUE(tensor.scalar_type() == dtype, what, " is ", nameOf(tensor.scalar_type()),
                    ", expected ", nameOf(dtype));
  const bool fits = std::ranges::equal(
      tensor.sizes(), sizes, [](int64_t size, int64_t due) { return due < 0 || size == due; });
  TORCH_CHECK_VALUE(fits, what, " has the sizes ", textOf(tensor.sizes()), ", expected ",
                    textOf(sizes));
  TORCH_CHECK_VALUE(tensor.is_contiguous(), what, " is not contiguous: call .contiguous() on it");
}

std::vector<int32_t> chosenExperts(const at::Tensor& topk, int64_t tokens, int numExperts) {
  const bool isWide = topk.scalar_type() == at::kLong;
  requireTensor(topk, "topk_idx", isWide ? at::kLong : at::kInt, {tokens, -1});
  return isWide ? narrow<int64_t>(topk, numExperts) : narrow<int32_t>(topk, numExperts);
}

GroupRanks maskOf(const at::Tensor& activeRanks, int size) {
  requireTensor(activeRanks, "active_ranks", at::kInt, {-1});
  TORCH_CHECK_VALUE(activeRanks.numel() >= size, "active_ranks has ", activeRanks.numel(),
                    " elements for ", size, " ranks");
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

}  // namespace mooncake
