// Which successors a rank still makes.
#include "group/successor_table.h"

#include <gtest/gtest.h>
#include <string>
#include <utility>
#include <vector>

namespace mooncake::test {
namespace {

class SuccessorTableTest : public ::testing::Test {
 protected:
  // Proposed by this rank, 0 of 4.
  void add(uint64_t digest, std::vector<int> absent) {
    Preparation one;
    one.successor.absent = std::move(absent);
    table.add(digest, std::move(one));
  }
  const LineMembers members{nullptr, "line", 0, {0, 1, 2, 3}};
  SuccessorTable table{members, 0};
};

TEST_F(SuccessorTableTest, ARemovalEndsWithTheLossOfItsCaller) {
  add(7, {3});
  for (const std::vector<bool>& active :
       {std::vector<bool>(4, true), std::vector<bool>{true, true, true, false}}) {
    ASSERT_NE(table.living(active), nullptr);
    EXPECT_EQ(table.living(active)->first, 7u);
    EXPECT_TRUE(table.voids(active).empty());
  }
  const std::vector<bool> lost{true, true, false, true};
  EXPECT_EQ(table.living(lost), nullptr);
  EXPECT_EQ(table.voids(lost), std::vector<uint64_t>{7});
  add(8, {2, 3});  // the next proposal
  ASSERT_NE(table.living(lost), nullptr);
  EXPECT_EQ(table.living(lost)->first, 8u);
}

}  // namespace
}  // namespace mooncake::test
