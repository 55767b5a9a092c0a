#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <string>
#include <unistd.h>

#include "base/cpu_cache.h"

namespace mooncake {
namespace {

constexpr size_t kUsual = size_t(32) << 20;

class CpuCache : public ::testing::Test {
 protected:
  CpuCache() {
    std::string pattern = ::testing::TempDir() + "/cacheXXXXXX";
    folder_ = ::mkdtemp(pattern.data());
  }
  ~CpuCache() override { std::filesystem::remove_all(folder_); }

  void add(int index, const std::string& level, const std::string& size) const {
    const auto one = folder_ / ("index" + std::to_string(index));
    std::filesystem::create_directories(one);
    std::ofstream(one / "level") << level << "\n";
    std::ofstream(one / "size") << size << "\n";
  }

  std::filesystem::path folder_;
};

TEST_F(CpuCache, TheLastOneCounts) {
  add(0, "1", "32K");
  add(1, "1", "48K");
  add(2, "3", "98304K");
  add(3, "2", "1024K");
  EXPECT_EQ(lastCacheBytes(folder_), size_t(96) << 20);
}

TEST_F(CpuCache, WhatIsNotDescribedIsAsUsual) {
  EXPECT_EQ(lastCacheBytes(folder_ / "none"), kUsual);
  add(0, "3", "nonsense");
  EXPECT_EQ(lastCacheBytes(folder_), kUsual);
}

}  // namespace
}  // namespace mooncake
