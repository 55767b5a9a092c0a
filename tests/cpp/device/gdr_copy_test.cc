#include "device/cuda/gdr_copy.h"

#include <cstdint>
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <vector>

namespace mooncake {
namespace {

constexpr size_t kPage = size_t(1) << 16;

// A library with pages of host memory.
class GdrCopyTest : public ::testing::Test {
 protected:
  struct Pinned {
    unsigned long at = 0;
    size_t bytes = 0;
    std::vector<std::byte> pages;
    bool isMapped = false;
  };
  inline static std::map<unsigned long, Pinned> pinned;
  inline static std::string fails;  // the function that does
  inline static int opened = 0;

  void SetUp() override {
    pinned.clear();
    fails.clear();
    opened = 0;
  }
  static GdrLibrary library() {
    GdrLibrary table;
    table.gdr_open = []() -> void* {
      if (fails == "gdr_open") return nullptr;
      ++opened;
      return &opened;
    };
    table.gdr_close = [](void*) { return --opened; };
    table.gdr_pin_buffer = [](void*, unsigned long at, size_t bytes, uint64_t, uint32_t,
                              GdrLibrary::Handle* handle) {
      if (fails == "gdr_pin_buffer" || at % kPage || bytes % kPage) return 22;
      handle->h = at;
      pinned[at] = {.at = at, .bytes = bytes, .pages = std::vector<std::byte>(bytes)};
      return 0;
    };
    table.gdr_unpin_buffer = [](void*, GdrLibrary::Handle handle) {
      EXPECT_FALSE(pinned.at(handle.h).isMapped);
      return int(pinned.erase(handle.h)) - 1;
    };
    table.gdr_get_info_v2 = [](void*, GdrLibrary::Handle handle, GdrLibrary::Info* info) {
      info->va = pinned.at(handle.h).at + (fails == "other pages" ? kPage : 0);
      info->mapped_size = pinned.at(handle.h).bytes;
      return fails == "gdr_get_info_v2" ? 22 : 0;
    };
    table.gdr_map = [](void*, GdrLibrary::Handle handle, void** address, size_t bytes) {
      if (fails == "gdr_map" || bytes != pinned.at(handle.h).bytes) return 12;
      *address = pinned.at(handle.h).pages.data();
      pinned.at(handle.h).isMapped = true;
      return 0;
    };
    table.gdr_unmap = [](void*, GdrLibrary::Handle handle, void* address, size_t bytes) {
      EXPECT_EQ(address, pinned.at(handle.h).pages.data());
      EXPECT_EQ(bytes, pinned.at(handle.h).bytes);
      pinned.at(handle.h).isMapped = false;
      return 0;
    };
    return table;
  }
  static std::span<std::byte> device(uintptr_t at, size_t bytes) {
    return {reinterpret_cast<std::byte*>(at), bytes};
  }
};

TEST_F(GdrCopyTest, MapsWholePagesAndFindsTheMemoryInThem) {
  GdrCopy gdr(library());
  const auto mapped = gdr.map(device(5 * kPage + 192, kPage));
  ASSERT_TRUE(mapped.ok()) << mapped.error().message;
  ASSERT_EQ(pinned.size(), 1u);
  auto& pages = pinned.at(5 * kPage);
  EXPECT_EQ(pages.bytes, 2 * kPage);
  EXPECT_EQ(mapped->data(), pages.pages.data() + 192);
  EXPECT_EQ(mapped->size(), kPage);
  gdr.unmap(*mapped);
  EXPECT_TRUE(pinned.empty());
  gdr.unmap(*mapped);  // it is gone
  EXPECT_EQ(opened, 1);
}

TEST_F(GdrCopyTest, ItsEndTakesMappingsBack) {
  {
    GdrCopy gdr(library());
    EXPECT_TRUE(gdr.map(device(kPage, 64)).ok());
    EXPECT_TRUE(gdr.map(device(7 * kPage, 64)).ok());
    EXPECT_EQ(opened, 1);
    EXPECT_EQ(pinned.size(), 2u);
  }
  EXPECT_TRUE(pinned.empty());
  EXPECT_EQ(opened, 0);
}

TEST_F(GdrCopyTest, AFailureNamesTheFunctionAndLeavesNothing) {
  for (const char* function :
       {"gdr_pin_buffer", "gdr_get_info_v2", "gdr_map", "gdr_open", "other pages"}) {
    GdrCopy gdr(library());
    fails = function;
    const auto mapped = gdr.map(device(kPage, 64));
    ASSERT_FALSE(mapped.ok()) << function;
    EXPECT_EQ(mapped.error().code, ErrorCode::kUnsupported);
    EXPECT_NE(mapped.error().message.find(function), std::string::npos) << mapped.error().message;
    EXPECT_TRUE(pinned.empty()) << function;
    fails.clear();
    EXPECT_TRUE(gdr.map(device(kPage, 64)).ok()) << function;
  }
}

TEST_F(GdrCopyTest, AMachineWithoutTheLibrarySaysSo) {
  GdrCopy gdr(GdrLibrary::load("libgdrapi-absent.so"));
  const auto mapped = gdr.map(device(kPage, 64));
  ASSERT_FALSE(mapped.ok());
  EXPECT_EQ(mapped.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(mapped.error().message.find("there is no GDRCopy"), std::string::npos);
  const auto other = GdrLibrary::load("libdl.so.2");
  ASSERT_FALSE(other.ok());
  EXPECT_NE(other.error().message.find("lacks gdr_open"), std::string::npos)
      << other.error().message;
}

}  // namespace
}  // namespace mooncake
