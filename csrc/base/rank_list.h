#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

// Lists of ranks in messages. They stay short in groups of a thousand ranks.
namespace mooncake {

// Most characters of a list.
constexpr size_t kMostListed = 200;

// Returns "0-3, 7, 9-1023". A list that would be longer than `most` ends with ", and 37 more".
std::string listRanks(std::span<const int> ranks, size_t most = kMostListed);
// Returns "no rank", "rank 3" or "ranks 0, 2, 4-9".
std::string nameRanks(std::span<const int> ranks, size_t most = kMostListed);
// Also names the global ranks where they differ: "rank 3 (global rank 7)". `globalRanks`: by rank
// of the group; empty: they do not differ.
std::string nameRanks(std::span<const int> ranks, std::span<const int> globalRanks);

// Ranks by a text that tells something of each, such as why it is lost. Ranks with the same text
// are named together.
class RankTexts {
 public:
  bool empty() const { return texts_.empty(); }
  size_t size() const { return texts_.size(); }
  void add(int rank, const std::string& text);
  // Joins what `phrase(ranks, text)` returns for each text, in the order of their first ranks. Ranks
  // of further texts than the first eight are only counted.
  template <typename Phrase>
  std::string join(const char* separator, Phrase&& phrase) const {
    std::string all;
    size_t left = 0;
    for (size_t i = 0; i < texts_.size(); ++i) {
      const auto& [text, ranks] = texts_[i];
      if (i < kMostTexts) {
        all += (all.empty() ? "" : separator) + phrase(ranks, text);
      } else {
        left += ranks.size();
      }
    }
    return left == 0 ? all : all + separator + "and " + std::to_string(left) + " more ranks";
  }

 private:
  static constexpr size_t kMostTexts = 8;
  std::vector<std::pair<std::string, std::vector<int>>> texts_;
};

}  // namespace mooncake
