#include "base/rank_list.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <numeric>

namespace mooncake {
namespace {

std::vector<int> every(int step, int end) {
  std::vector<int> ranks;
  for (int rank = 0; rank < end; rank += step) ranks.push_back(rank);
  return ranks;
}

TEST(RankList, JoinsRunsOfThreeAndMore) {
  EXPECT_EQ(listRanks({}), "");
  EXPECT_EQ(listRanks(std::vector{3}), "3");
  EXPECT_EQ(listRanks(std::vector{3, 4}), "3, 4");
  EXPECT_EQ(listRanks(std::vector{0, 1, 2, 3, 7, 9, 10, 11}), "0-3, 7, 9-11");
  EXPECT_EQ(listRanks(every(1, 1024)), "0-1023");
}

TEST(RankList, SaysHowManyItLeavesOut) {
  const std::vector<int> alternating = every(2, 2048);
  const std::string text = listRanks(alternating);
  EXPECT_LE(text.size(), kMostListed);
  EXPECT_GT(text.size(), kMostListed - 10);
  const auto listed = std::ranges::count(text, ',');
  EXPECT_TRUE(text.ends_with(", and " + std::to_string(1024 - listed) + " more")) << text;
  for (size_t most = 20; most < 300; ++most) EXPECT_LE(listRanks(alternating, most).size(), most);
}

TEST(RankList, NamesRanksAndGlobalRanks) {
  EXPECT_EQ(nameRanks({}), "no rank");
  EXPECT_EQ(nameRanks(std::vector{3}), "rank 3");
  EXPECT_EQ(nameRanks(std::vector{0, 2, 4, 5, 6}), "ranks 0, 2, 4-6");
  EXPECT_LE(nameRanks(every(2, 2048)).size(), kMostListed);
  const std::vector<int> ranks{0, 1};
  EXPECT_EQ(nameRanks(ranks, std::vector<int>()), "ranks 0, 1");
  EXPECT_EQ(nameRanks(ranks, std::vector{0, 1, 5}), "ranks 0, 1");
  EXPECT_EQ(nameRanks(ranks, std::vector{4, 6}), "ranks 0, 1 (global ranks 4, 6)");
  EXPECT_EQ(nameRanks(std::vector{1}, std::vector{4, 6}), "rank 1 (global rank 6)");
  std::vector<int> globalRanks(2048);
  std::iota(globalRanks.begin(), globalRanks.end(), 1000);
  EXPECT_LE(nameRanks(every(2, 2048), globalRanks).size(), kMostListed);
}

TEST(RankTexts, NamesRanksWithTheSameTextTogether) {
  RankTexts texts;
  const auto joined = [&] {
    return texts.join("; ", [](const std::vector<int>& ranks, const std::string& text) {
      return nameRanks(ranks) + " " + text;
    });
  };
  EXPECT_EQ(joined(), "");
  texts.add(1, "left");
  texts.add(2, "died");
  texts.add(3, "left");
  EXPECT_EQ(joined(), "ranks 1, 3 left; rank 2 died");
  for (int rank = 4; rank < 20; ++rank) texts.add(rank, "is " + std::to_string(rank));
  EXPECT_TRUE(joined().ends_with("; rank 9 is 9; and 10 more ranks")) << joined();
}

}  // namespace
}  // namespace mooncake
