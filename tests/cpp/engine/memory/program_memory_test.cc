#include "engine/memory/program_memory.h"

#include <cstring>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "base/fd.h"

namespace mooncake {
namespace {

// Pages of a program, which may unmap some of them.
class Pages {
 public:
  explicit Pages(size_t count, int protection = PROT_READ | PROT_WRITE)
      : bytes_(count * page()),
        start_(static_cast<std::byte*>(
            ::mmap(nullptr, bytes_, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  ~Pages() { ::munmap(start_, bytes_); }
  static size_t page() { return static_cast<size_t>(::sysconf(_SC_PAGESIZE)); }
  std::byte* at(size_t page) const { return start_ + page * Pages::page(); }
  void unmap(size_t page) { ::munmap(at(page), Pages::page()); }
  void protect(size_t page, int protection) { ::mprotect(at(page), Pages::page(), protection); }
  size_t bytes() const { return bytes_; }

 private:
  const size_t bytes_;
  std::byte* const start_;
};

TEST(ProgramMemory, AHoleIsSeen) {
  Pages pages(3);
  EXPECT_TRUE(isMapped(pages.at(0), pages.bytes()));
  pages.unmap(1);
  EXPECT_FALSE(isMapped(pages.at(0), pages.bytes()));
  EXPECT_TRUE(isMapped(pages.at(0), Pages::page()));
  EXPECT_FALSE(isMapped(pages.at(0) + 1, Pages::page()));
  EXPECT_FALSE(isMapped(pages.at(1) + 5, 1));
  EXPECT_TRUE(isMapped(pages.at(2) + 5, 1));
  EXPECT_TRUE(isMapped(nullptr, 0));
}

TEST(ProgramMemory, ACopyMeetsAHole) {
  Pages pages(1024);
  std::vector<std::byte> bytes(pages.bytes(), std::byte{7});
  EXPECT_TRUE(copyIfMapped(pages.at(0), bytes.data(), bytes.size()));
  EXPECT_EQ(std::memcmp(pages.at(0), bytes.data(), bytes.size()), 0);
  pages.unmap(700);
  EXPECT_FALSE(copyIfMapped(pages.at(0), bytes.data(), bytes.size()));
  EXPECT_FALSE(copyIfMapped(bytes.data(), pages.at(0), bytes.size()));
  EXPECT_TRUE(copyIfMapped(bytes.data(), pages.at(701), Pages::page()));
}

// A fault in any of these copies would end the test with SIGSEGV or SIGBUS.
TEST(ProgramMemory, ACopyMeetsAPageThatMustNotBeTouched) {
  Pages pages(1024);
  std::vector<std::byte> bytes(pages.bytes(), std::byte{7});
  const auto fails = [&](size_t from, size_t count) {
    const bool isWritten =
        copyIfMapped(pages.at(from) + 5, bytes.data(), count * Pages::page() - 5);
    const bool isRead = copyIfMapped(bytes.data(), pages.at(from) + 5, count * Pages::page() - 5);
    return std::pair(!isWritten, !isRead);
  };
  pages.protect(700, PROT_NONE);
  for (const auto& [from, count] : {std::pair(0, 1024), {699, 3}, {699, 2}, {700, 1}, {700, 2}})
    EXPECT_EQ(fails(size_t(from), size_t(count)), std::pair(true, true)) << from << " " << count;
  EXPECT_EQ(fails(0, 700), std::pair(false, false));
  pages.protect(700, PROT_READ);
  EXPECT_EQ(fails(699, 3), std::pair(true, false));
}

TEST(ProgramMemory, ACopyMeetsTheEndOfAFile) {
  const Fd file(::memfd_create("program", 0));
  const size_t page = Pages::page();
  ASSERT_EQ(::ftruncate(file.get(), off_t(4 * page)), 0);
  auto* const mapped = static_cast<std::byte*>(
      ::mmap(nullptr, 4 * page, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0));
  std::vector<std::byte> bytes(4 * page, std::byte{7});
  EXPECT_TRUE(copyIfMapped(mapped, bytes.data(), bytes.size()));
  ASSERT_EQ(::ftruncate(file.get(), off_t(2 * page)), 0);
  EXPECT_FALSE(copyIfMapped(mapped, bytes.data(), bytes.size()));
  EXPECT_FALSE(copyIfMapped(bytes.data(), mapped, bytes.size()));
  EXPECT_TRUE(copyIfMapped(mapped, bytes.data(), 2 * page));
  ::munmap(mapped, 4 * page);
}

TEST(ProgramMemory, RangesOfACopyMayOverlap) {
  std::vector<std::byte> bytes(5 << 20);
  for (const size_t distance : {size_t(1), size_t(4096), size_t(3) << 20}) {
    for (const bool isForward : {false, true}) {
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::byte(i * i >> 7);
      const auto before = bytes;
      const size_t to = isForward ? distance : 0, from = isForward ? 0 : distance;
      EXPECT_TRUE(copyIfMapped(&bytes[to], &bytes[from], bytes.size() - distance));
      EXPECT_EQ(std::memcmp(&bytes[to], &before[from], bytes.size() - distance), 0);
    }
  }
}

TEST(ProgramMemory, ProtectionIsWhatTheEndsShow) {
  Pages pages(3);
  const auto expect = [&](bool isReadable, bool isWritable) {
    const Protection shown = protectionOf(pages.at(0) + 1, pages.bytes() - 1);
    EXPECT_EQ(shown.isReadable, isReadable);
    EXPECT_EQ(shown.isWritable, isWritable);
  };
  std::memset(pages.at(0), 5, pages.bytes());
  expect(true, true);
  EXPECT_EQ(*pages.at(2), std::byte{5});
  pages.protect(2, PROT_READ);
  expect(true, false);
  pages.protect(0, PROT_NONE);
  expect(false, false);
  pages.protect(0, PROT_READ | PROT_WRITE);
  pages.protect(2, PROT_READ | PROT_WRITE);
  expect(true, true);
  pages.unmap(1);
  expect(false, false);
}

}  // namespace
}  // namespace mooncake
