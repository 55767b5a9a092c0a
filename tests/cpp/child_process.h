#pragma once

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <map>
#include <spawn.h>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/fd.h"

// A real second process: the same test binary, started anew to run one test that is disabled
// otherwise. (A fork without exec does not work once there are threads.) The two processes exchange
// length-prefixed messages over two pipes.
namespace mooncake::testing {

inline void sendMessage(int pipe, ByteView message) {
  const Bytes framed = ByteWriter().putBytes(message).take();
  ASSERT_EQ(::write(pipe, framed.data(), framed.size()), static_cast<ssize_t>(framed.size()));
}

// Returns the next message; empty at the end of the pipe.
inline Bytes receiveMessage(int pipe) {
  const auto readAll = [&](void* target, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
      const ssize_t got = ::read(pipe, static_cast<char*>(target) + done, bytes - done);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return false;
      done += static_cast<size_t>(got);
    }
    return true;
  };
  uint32_t length = 0;
  if (!readAll(&length, sizeof(length)) || length > 65536) return {};
  Bytes message(length);
  return readAll(message.data(), length) ? message : Bytes();
}

class ChildProcess {
 public:
  // Descriptors of the pipes in the child.
  static constexpr int kFromParent = 3, kToParent = 4;
  // True in a child that was started to run this test.
  static bool isChild() { return std::getenv("MOONCAKE_TEST_CHILD") != nullptr; }

  // `test` is "Suite.DISABLED_Name"; the environment is this process's plus `env`.
  explicit ChildProcess(const std::string& test, std::map<std::string, std::string> env = {}) {
    int down[2], up[2];
    // Above the numbers that the child uses, so that dup2 never meets an end that is still needed.
    EXPECT_EQ(::pipe2(down, O_CLOEXEC), 0);
    EXPECT_EQ(::pipe2(up, O_CLOEXEC), 0);
    for (int* fd : {&down[0], &down[1], &up[0], &up[1]}) {
      const int high = ::fcntl(*fd, F_DUPFD_CLOEXEC, 16);
      ::close(std::exchange(*fd, high));
    }
    env["MOONCAKE_TEST_CHILD"] = "1";
    std::vector<std::string> variables;
    for (char** variable = environ; *variable; ++variable) variables.emplace_back(*variable);
    for (const auto& [name, value] : env) variables.push_back(name + "=" + value);
    std::vector<char*> pointers;
    for (auto& variable : variables) pointers.push_back(variable.data());
    pointers.push_back(nullptr);
    std::string self = "/proc/self/exe", filter = "--gtest_filter=" + test,
                disabled = "--gtest_also_run_disabled_tests", brief = "--gtest_brief=1";
    char* arguments[] = {self.data(), filter.data(), disabled.data(), brief.data(), nullptr};
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, down[0], kFromParent);
    ::posix_spawn_file_actions_adddup2(&actions, up[1], kToParent);
    ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    EXPECT_EQ(::posix_spawn(&pid_, self.c_str(), &actions, nullptr, arguments, pointers.data()), 0);
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(down[0]);
    ::close(up[1]);
    toChild_ = Fd(down[1]);
    fromChild_ = Fd(up[0]);
  }
  ~ChildProcess() {
    if (pid_ > 0) kill();
  }

  pid_t pid() const { return pid_; }
  void send(ByteView message) { sendMessage(toChild_.get(), message); }
  Bytes receive() { return receiveMessage(fromChild_.get()); }

  void kill() {
    ::kill(pid_, SIGKILL);
    wait();
  }
  // Closes the pipe to the child, for which an idle child waits. Returns the child's exit status.
  int finish() {
    toChild_.reset();
    return wait();
  }

 private:
  int wait() {
    int status = -1;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    return status;
  }

  pid_t pid_ = -1;
  Fd toChild_;
  Fd fromChild_;
};

}  // namespace mooncake::testing
