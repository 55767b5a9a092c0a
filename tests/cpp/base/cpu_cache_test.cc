#include "base/cpu_cache.h"

#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <string>
#include <unistd.h>

namespace mooncake {
namespace {

class LastCache : public ::testing::Test {
 protected:
  LastCache() {
    std::string pattern = ::testing::TempDir() + "/cacheXXXXXX";
    folder_ = ::mkdtemp(pattern.data());
  }
  ~LastCache() override { std::filesystem::remove_all(folder_); }

  void add(int index, const std::string& level, const std::string& size,
           const std::string& cores = "") const {
    const auto one = folder_ / ("index" + std::to_string(index));
    std::filesystem::create_directories(one);
    std::ofstream(one / "level") << level << "\n";
    std::ofstream(one / "size") << size << "\n";
    if (!cores.empty()) std::ofstream(one / "shared_cpu_list") << cores << "\n";
  }

  std::filesystem::path folder_;
};

TEST_F(LastCache, IsTheOneOfTheHighestLevel) {
  add(0, "1", "32K", "0");
  add(1, "1", "48K", "0");
  add(2, "3", "98304K", "0-23");
  add(3, "2", "1024K", "0-1");
  EXPECT_EQ(lastCache(folder_).bytes, size_t(96) << 20);
  EXPECT_EQ(lastCache(folder_).cores, 24u);
}

TEST_F(LastCache, TellsWhoSharesIt) {
  const auto coresOf = [&](const std::string& list) {
    add(0, "3", "1024K", list);
    return lastCache(folder_).cores;
  };
  EXPECT_EQ(coresOf("0"), 1u);
  EXPECT_EQ(coresOf("0-7,64-71"), 16u);
  EXPECT_EQ(coresOf("0,2,5-6"), 4u);
  for (const std::string nonsense : {"all", "7-3", "0-", "0,", "-"})
    EXPECT_EQ(coresOf(nonsense), 0u) << nonsense;
}

TEST_F(LastCache, WhatIsNotDescribedIsAsUsual) {
  const CpuCache usual;
  EXPECT_EQ(lastCache(folder_ / "none").bytes, usual.bytes);
  add(0, "3", "nonsense");
  EXPECT_EQ(lastCache(folder_).bytes, usual.bytes);
  add(0, "3", "2048K");
  EXPECT_EQ(lastCache(folder_).bytes, size_t(2) << 20);
  EXPECT_EQ(lastCache(folder_).cores, 0u);
}

}  // namespace
}  // namespace mooncake
