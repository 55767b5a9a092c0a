#pragma once

#include <algorithm>
#include <fcntl.h>
#include <filesystem>
#include <gtest/gtest.h>
#include <string>
#include <sys/resource.h>
#include <unistd.h>
#include <vector>

// If no descriptor is left, the sanitizer cannot open the pipe by which it checks whether memory is
// readable. It then takes every object for an invalid one.
#ifdef MOONCAKE_SANITIZES_UNDEFINED
#define SKIP_WHERE_CHECKS_NEED_DESCRIPTORS() GTEST_SKIP() << "UBSan needs descriptors itself"
#else
#define SKIP_WHERE_CHECKS_NEED_DESCRIPTORS() static_assert(true)
#endif

namespace mooncake::test {

// While this lives, the process may open only `more` further descriptors.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(size_t more) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    std::vector<size_t> numbers;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
      numbers.push_back(std::stoul(entry.path().filename().string()));
    const auto isOpen = [](size_t number) {
      return ::fcntl(static_cast<int>(number), F_GETFD) >= 0;
    };
    std::erase_if(numbers, [&](size_t number) { return !isOpen(number); });
    const size_t highest = *std::ranges::max_element(numbers);  // the limit is on the numbers
    for (size_t number = 0; number < highest; ++number) {
      if (isOpen(number)) continue;
      fillers_.push_back(::fcntl(0, F_DUPFD_CLOEXEC, static_cast<int>(number)));
    }
    rlimit limit = before_;
    limit.rlim_cur = highest + 1 + more;
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
  ~DescriptorLimit() {
    ::setrlimit(RLIMIT_NOFILE, &before_);
    for (const int filler : fillers_) ::close(filler);
  }
  DescriptorLimit(const DescriptorLimit&) = delete;
  DescriptorLimit& operator=(const DescriptorLimit&) = delete;

 private:
  rlimit before_{};
  std::vector<int> fillers_;
};

}  // namespace mooncake::test
