#include "backend/active_ranks.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>

namespace mooncake {

ActiveRanks::ActiveRanks(const at::Tensor& shown, int size)
    : size_(size), shown_(shown.defined() ? shown : ones(size, false)), host_(shown_) {}

ActiveRanks::ActiveRanks(at::Tensor shown, at::Tensor host, int size)
    : size_(size), shown_(std::move(shown)), host_(std::move(host)) {}

at::Tensor ActiveRanks::ones(int size, bool isPinned) {
  return at::ones({size}, at::TensorOptions(at::kInt).device(at::kCPU).pinned_memory(isPinned));
}

void ActiveRanks::show(const GroupView& view, bool isLoss) {
  if (isLoss && keepsLost_) return;
  int32_t* const elements = host_.mutable_data_ptr<int32_t>();
  // The group may have grown.
  const int last = view.active.empty() ? 0 : view.active.back() + 1;
  size_ = std::max(size(), std::min(last, int(host_.numel())));
  for (int r = 0; r < size(); ++r) {
    std::atomic_ref<int32_t>(elements[r]).store(view.contains(r), std::memory_order_release);
  }
  changes_.fetch_add(1, std::memory_order_release);
}

std::shared_ptr<const GroupView> ActiveRanks::kept() const {
  if (!keepsLost_) return nullptr;
  auto view = std::make_shared<GroupView>();
  int32_t* const elements = host_.mutable_data_ptr<int32_t>();
  for (int r = 0; r < size(); ++r) {
    if (std::atomic_ref<int32_t>(elements[r]).load(std::memory_order_acquire) != 0)
      view->active.push_back(r);
  }
  return view;
}

bool ActiveRanks::areOnly(uint64_t active) const {
  int32_t* const elements = host_.mutable_data_ptr<int32_t>();
  for (int r = 0; r < size(); ++r) {
    const auto shown = std::atomic_ref<int32_t>(elements[r]).load(std::memory_order_acquire);
    if (shown != 0 && (active >> r & 1) == 0) return false;
  }
  return true;
}

}  // namespace mooncake
