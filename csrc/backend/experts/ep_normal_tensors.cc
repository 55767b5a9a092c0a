#include "backend/experts/ep_normal_tensors.h"

#include <algorithm>
#include <numeric>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

namespace mooncake {

using MaybeTensor = std::optional<at::Tensor>;

at::Tensor plain(const at::Tensor& given, const c10::Device& home) {
  return given.to(home).resolve_conj().resolve_neg().contiguous();
}

std::vector<at::Tensor> plain(const std::vector<at::Tensor>& given, const c10::Device& home) {
  std::vector<at::Tensor> found;
  for (const at::Tensor& one : given) found.push_back(plain(one, home));
  return found;
}

at::Tensor asBytes(const at::Tensor& rows) { return rows.view(at::kByte); }

void requireHome(const c10::Device& home, const MaybeTensor& given, const std::string& name) {
  TORCH_CHECK_VALUE(!given || given->device() == home, name, " is on ", given->device(), ", x on ",
                    home, ": give tensors of one device");
}

at::Tensor ranksOf(const at::Tensor& isInRank) {
  const int64_t tokens = isInRank.size(0), size = isInRank.size(1);
  if (!isInRank.is_cpu()) {
    const at::Tensor ranks = at::arange(size, isInRank.options().dtype(at::kInt));
    return ranks.expand({tokens, size}).masked_fill(isInRank.logical_not(), -1).contiguous();
  }
  const bool* const is = isInRank.const_data_ptr<bool>();
  int64_t most = 1;
  for (int64_t t = 0; t < tokens; ++t)
    most = std::max<int64_t>(most, std::count(is + t * size, is + (t + 1) * size, true));
  at::Tensor found = at::empty({tokens, most}, at::kInt);
  int32_t* to = found.mutable_data_ptr<int32_t>();
  for (int64_t t = 0; t < tokens; ++t, to += most) {
    int32_t* next = to;
    for (int64_t r = 0; r < size; ++r)
      if (is[t * size + r]) *next++ = int32_t(r);
    std::fill(next, to + most, -1);
  }
  return found;
}

at::Tensor choicesOf(const at::Tensor& isInRank, const at::Tensor& ranks) {
  const at::Tensor places = isInRank.cumsum(0) - 1;
  return at::stack({ranks, places.gather(1, ranks.clamp_min(0).to(at::kLong)).to(at::kInt)}, 2)
      .contiguous();
}

void clearBehind(const std::vector<at::Tensor>& all, const at::Tensor& ends) {
  const at::Tensor rows = at::arange(all.front().size(0), ends.options());
  const at::Tensor areBehind = rows.ge(ends.narrow(0, ends.size(0) - 1, 1));
  for (const at::Tensor& one : all)
    asBytes(one.dim() == 1 ? one.unsqueeze(1) : one).masked_fill_(areBehind.unsqueeze(1), 0);
}

at::Tensor padded(const at::Tensor& rows, int64_t count) {
  if (rows.size(0) >= count) return rows;
  auto sizes = rows.sizes().vec();
  sizes[0] = count;
  at::Tensor whole = at::zeros(sizes, rows.options());
  whole.narrow(0, 0, rows.size(0)).copy_(rows);
  return whole;
}

at::Tensor joined(const at::Tensor& rows, const std::vector<int64_t>& begins,
                  const std::vector<int64_t>& counts) {
  const at::Tensor bytes = asBytes(rows.dim() == 1 ? rows.unsqueeze(1) : rows);
  std::vector<at::Tensor> blocks;
  for (size_t r = 0; r < counts.size(); ++r)
    blocks.push_back(bytes.narrow(0, begins[r], counts[r]));
  const at::Tensor found = at::cat(blocks).view(rows.scalar_type());
  return rows.dim() == 1 ? found.flatten() : found;
}

std::vector<int64_t> beginsOf(const std::vector<int64_t>& counts) {
  std::vector<int64_t> begins(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), begins.begin(), int64_t(0));
  return begins;
}

int64_t sumOf(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t(0));
}

std::vector<bool> flagsOf(const GroupRanks& ranks, int size) {
  std::vector<bool> flags;
  for (int r = 0; r < size; ++r) flags.push_back(ranks.contains(r));
  return flags;
}

at::Tensor tensorOf(const std::vector<bool>& flags) {
  at::Tensor found = at::empty({int64_t(flags.size())}, at::kBool);
  std::ranges::copy(flags, found.mutable_data_ptr<bool>());
  return found;
}

at::Tensor maskOn(const c10::Device& device, const MaybeTensor& activeRanks, int size) {
  const auto ints = at::TensorOptions(at::kInt).device(device);
  if (!activeRanks) return at::ones({size}, ints);
  return activeRanks->narrow(0, 0, size).to(device).ne(0).to(at::kInt);
}

void show(const MaybeTensor& activeRanks, const at::Tensor& gone) {
  if (!activeRanks) return;
  activeRanks->narrow(0, 0, gone.size(0)).masked_fill_(gone.to(activeRanks->device()), 0);
}

}  // namespace mooncake
