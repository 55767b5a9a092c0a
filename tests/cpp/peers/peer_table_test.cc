#include "peers/peer_table.h"

#include <gtest/gtest.h>
#include <string>

namespace mooncake {
namespace {

std::string errorOf(const std::string& text) {
  const auto table = PeerTable::parse(text, "a.txt");
  return table.ok() ? "" : table.error().message;
}

TEST(PeerTable, FindsTheLineOfTheSize) {
  const auto table = PeerTable::parse(
      "# measured\n"
      "all_reduce 4 65536 1 4   # behind a line with more bytes\n"
      "all_reduce 4 1048576 2 8\r\n"
      "\n"
      "all_reduce 4 1024 1 1\n"
      "all_reduce 3 0 2 2\n"
      "all_gather 4 0 1 3",
      "a.txt");
  ASSERT_TRUE(table.ok()) << table.error().message;
  EXPECT_FALSE(table->find("all_reduce", 4, 1023));
  EXPECT_EQ(table->find("all_reduce", 4, 1024)->blocks, 1u);
  EXPECT_EQ(table->find("all_reduce", 4, 65535)->blocks, 1u);
  EXPECT_EQ(table->find("all_reduce", 4, 65536)->blocks, 4u);
  EXPECT_FALSE(table->find("all_reduce", 4, 65536)->isTwoShot);
  EXPECT_TRUE(table->find("all_reduce", 4, size_t{1} << 40)->isTwoShot);
  EXPECT_TRUE(table->find("all_reduce", 3, 0)->isTwoShot);
  EXPECT_EQ(table->find("all_gather", 4, 5)->blocks, 3u);
  EXPECT_FALSE(table->find("all_gather", 3, 5));
  EXPECT_FALSE(table->find("broadcast", 4, 5));
}

TEST(PeerTable, HashesItsLines) {
  const auto hashOf = [](const std::string& text) { return PeerTable::parse(text, "")->hash(); };
  const std::string line = "all_reduce 4 0 1 4\n", other = "all_reduce 4 64 2 4\n";
  EXPECT_EQ(hashOf(line + other), hashOf("# other order\n" + other + line));
  for (const char* const changed :
       {"", "all_reduce 4 0 1 3", "all_reduce 4 0 2 4", "all_reduce 4 1 1 4", "all_reduce 5 0 1 4",
        "all_gather 4 0 1 4", "all_reduce 4 0 1 4\nall_gather 4 0 1 4"})
    EXPECT_NE(hashOf(line), hashOf(changed)) << changed;
}

TEST(PeerTable, RefusesWrongLines) {
  EXPECT_EQ(errorOf("all_reduce 4 0 1 1\nall_reduce 4 0 1"),
            "a.txt, line 2: it must have VERB RANKS BYTES EXCHANGES BLOCKS");
  const std::pair<const char*, const char*> cases[] = {
      {"all_reduce 4 0 1 1 1", "it must have"},
      {"all_to_all 4 0 1 1", "the verb 'all_to_all' is none of all_reduce, reduce_scatter"},
      {"all_reduce 0 0 1 1", "RANKS is '0'"},
      {"all_reduce 33 0 1 1", "RANKS is '33', and must be a number from 1 to 32"},
      {"all_reduce 4 -1 1 1", "BYTES is '-1'"},
      {"all_reduce 4 1K 1 1", "BYTES is '1K'"},
      {"all_reduce 4 99999999999999999999 1 1", "BYTES is"},
      {"all_reduce 4 0 3 1", "EXCHANGES is '3', and must be a number from 1 to 2"},
      {"all_reduce 2 0 2 1", "EXCHANGES is '2', and must be a number from 1 to 1"},
      {"all_gather 4 0 2 1", "EXCHANGES is '2'"},
      {"all_reduce 4 0 1 0", "BLOCKS is '0'"},
      {"all_reduce 4 0 1 9", "BLOCKS is '9', and must be a number from 1 to 8"},
  };
  for (const auto& [text, part] : cases)
    EXPECT_NE(errorOf(text).find(std::string("a.txt, line 1: ") + part), std::string::npos)
        << errorOf(text);
}

TEST(PeerTable, NamesAFileThatIsMissing) {
  const auto table = PeerTable::read("/nowhere/table.txt");
  ASSERT_FALSE(table.ok());
  EXPECT_EQ(table.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(table.error().message, "cannot read '/nowhere/table.txt': No such file or directory");
}

}  // namespace
}  // namespace mooncake
