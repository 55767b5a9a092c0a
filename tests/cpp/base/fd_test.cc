#include "base/fd.h"

#include <cerrno>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fork.h"

namespace mooncake {
namespace {

bool isOpen(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

// Runs the function in a forked child, and returns its result.
template <typename Function>
int inForkedChild(Function&& function) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(function());
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(FdTest, IsClosedInForkedChildren) {
  Fd one(::dup(0)), other(::dup(0));
  const Fd moved = std::move(one);
  const int plain = ::dup(0), first = moved.get(), second = other.get();
  EXPECT_EQ(inForkedChild([&] { return isOpen(first) + 2 * isOpen(second) + 4 * isOpen(plain); }),
            4);
  EXPECT_TRUE(isOpen(first) && isOpen(second));
  other.reset();
  // The number belongs to another file now.
  const int reused = ::fcntl(0, F_DUPFD, second);
  ASSERT_EQ(reused, second);
  EXPECT_EQ(inForkedChild([&] { return int(isOpen(reused)); }), 1);
  ::close(reused);
  ::close(plain);
}

TEST(FdTest, WhatIsLeftInAChildClosesNothing) {
  Fd inherited(::dup(0));
  const int number = inherited.get();
  EXPECT_EQ(inForkedChild([&] {
              Fd own(::fcntl(0, F_DUPFD, number));
              if (own.get() != number) return 10;
              inherited.reset();
              return int(isOpen(number));
            }),
            1);
  EXPECT_TRUE(isOpen(number));
}

TEST(ForkTest, CountsGenerations) {
  const uint32_t here = forkGeneration();
  EXPECT_EQ(inForkedChild([&] { return int(forkGeneration() - here); }), 1);
  EXPECT_EQ(forkGeneration(), here);
}

}  // namespace
}  // namespace mooncake
