#include "backend/experts/ep_agreed.h"

#include <algorithm>
#include <array>
#include <utility>

#include "backend/experts/ep_tensors.h"
#include "base/hash.h"
#include "base/rank_list.h"

namespace mooncake {
namespace {

// The dtype and the columns of a tensor: both 0 for none.
std::array<uint32_t, 2> formOf(const at::Tensor& tensor) {
  return {uint32_t(tensor.scalar_type()) + 1, uint32_t(tensor.size(1))};
}

std::string textOf(const Agreed& one, uint32_t first, uint32_t second) {
  if (std::holds_alternative<int64_t>(one.value)) return std::to_string(first);
  if (first == 0) return "none";
  const bool isKnown = first <= uint32_t(at::ScalarType::NumOptions);
  return (isKnown ? nameOf(at::ScalarType(first - 1)) : "another dtype") + " [n, " +
         std::to_string(second) + "]";
}

}  // namespace

std::vector<uint32_t> numbersOf(const std::vector<Agreed>& agreed) {
  std::vector<uint32_t> numbers;
  for (const Agreed& one : agreed) {
    std::array<uint32_t, 2> both{};
    if (const auto* number = std::get_if<int64_t>(&one.value)) both = {uint32_t(*number), 0};
    if (const auto* tensor = std::get_if<at::Tensor>(&one.value)) both = formOf(*tensor);
    numbers.insert(numbers.end(), both.begin(), both.end());
  }
  return numbers;
}

uint32_t hashOf(const std::vector<Agreed>& agreed) {
  uint32_t hash = fnv1a({});
  for (const uint32_t number : numbersOf(agreed)) hash = fnv1a({number}, hash);
  return hash;
}

uint32_t hashOf(const std::vector<at::Tensor>& fields, uint64_t number) {
  uint32_t hash = fnv1a({number});
  for (const at::Tensor& field : fields) {
    const auto [dtype, columns] = formOf(field);
    hash = fnv1a({dtype, columns}, hash);
  }
  return hash;
}

std::string differenceOf(const std::vector<Agreed>& agreed,
                         const std::vector<std::vector<uint32_t>>& all, size_t begin,
                         const GroupRanks& ranks) {
  for (const Agreed& one : agreed) {
    std::vector<std::pair<std::string, std::vector<int>>> ranksOfValues;
    for (int r = 0; r < int(all.size()); ++r) {
      if (!ranks.contains(r)) continue;
      const std::string text = textOf(one, all[size_t(r)][begin], all[size_t(r)][begin + 1]);
      auto known = std::ranges::find_if(ranksOfValues, [&](auto& of) { return of.first == text; });
      if (known == ranksOfValues.end())
        known = ranksOfValues.insert(known, {text, std::vector<int>()});
      known->second.push_back(r);
    }
    begin += 2;
    if (ranksOfValues.size() < 2) continue;
    std::string why;
    for (const auto& [value, of] : ranksOfValues)
      why += (why.empty() ? "" : "; ") + value + " on " + nameRanks(of);
    return one.name + " differs between the ranks: " + why;
  }
  return "";
}

}  // namespace mooncake
