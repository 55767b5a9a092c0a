#include "base/rank_list.h"

#include <algorithm>
#include <string_view>

namespace mooncake {
namespace {

constexpr std::string_view kPlural = "ranks ";
constexpr std::string_view kGlobal = " (global )";

std::string andMore(size_t ranks) {
  return ranks == 0 ? "" : ", and " + std::to_string(ranks) + " more";
}

}  // namespace

std::string listRanks(std::span<const int> ranks, size_t most) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end < i + 3) end = i + 1;
    std::string next = (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
    if (end > i + 1) next += "-" + std::to_string(ranks[end - 1]);
    if (text.size() + next.size() + andMore(ranks.size() - end).size() > most)
      return text + andMore(ranks.size() - i);
    text += next;
    i = end;
  }
  return text;
}

std::string nameRanks(std::span<const int> ranks, size_t most) {
  if (ranks.empty()) return "no rank";
  if (ranks.size() == 1) return "rank " + std::to_string(ranks[0]);
  return std::string(kPlural) + listRanks(ranks, most - kPlural.size());
}

std::string nameRanks(std::span<const int> ranks, std::span<const int> globalRanks) {
  std::vector<int> global;
  for (const int rank : ranks)
    global.push_back(globalRanks.empty() ? rank : globalRanks[size_t(rank)]);
  if (std::ranges::equal(ranks, global)) return nameRanks(ranks);
  constexpr size_t kHalf = (kMostListed - kGlobal.size()) / 2;
  return nameRanks(ranks, kHalf) + " (global " + nameRanks(global, kHalf) + ")";
}

void RankTexts::add(int rank, const std::string& text) {
  auto same = std::ranges::find(texts_, text, &std::pair<std::string, std::vector<int>>::first);
  if (same == texts_.end()) same = texts_.insert(same, {text, {}});
  same->second.push_back(rank);
}

}  // namespace mooncake
