// If the system has no thread left, a call that needs one returns an error.
#include "base/thread.h"

#include <array>
#include <atomic>
#include <fstream>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>
#include <vector>

#include "base/env.h"
#include "base/event_loop.h"
#include "engine/engine.h"

namespace mooncake {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool isSanitized = true;
#else
constexpr bool isSanitized = false;
#endif

// While this lives, the process gets no further thread: there is no address space for a stack, and
// all stacks of ended threads are in use again.
class NoMoreThreads {
 public:
  NoMoreThreads() {
    ::getrlimit(RLIMIT_AS, &before_);
    std::ifstream statm("/proc/self/statm");
    rlim_t pages = 0;
    statm >> pages;
    rlimit limit = before_;
    limit.rlim_cur = pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + (rlim_t(2) << 20);
    ::setrlimit(RLIMIT_AS, &limit);
    while (threads_.size() < kMost) {
      auto thread = startThread("mooncake-rest", [this] { mayEnd_.wait(false); });
      if (!thread.ok()) break;
      threads_.push_back(std::move(*thread));
    }
  }
  ~NoMoreThreads() {
    ::setrlimit(RLIMIT_AS, &before_);
    mayEnd_ = true;
    mayEnd_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  NoMoreThreads(const NoMoreThreads&) = delete;
  NoMoreThreads& operator=(const NoMoreThreads&) = delete;

 private:
  static constexpr size_t kMost = 64;
  rlimit before_{};
  std::atomic<bool> mayEnd_{false};
  std::vector<std::thread> threads_;
};

TEST(StartThread, RunsTheBodyUnderItsName) {
  std::atomic<bool> mayEnd{false};
  auto thread = startThread("mooncake-a-long-name", [&] {
    while (!mayEnd) std::this_thread::yield();
  });
  ASSERT_TRUE(thread.ok()) << thread.error().message;
  std::array<char, 16> name{};
  ::pthread_getname_np(thread->native_handle(), name.data(), name.size());
  EXPECT_STREQ(name.data(), "mooncake-a-long");
  mayEnd = true;
  thread->join();
}

TEST(StartThread, SaysThatThereIsNone) {
  if (isSanitized) GTEST_SKIP() << "the sanitizer has mapped more than any limit";
  const NoMoreThreads limit;
  auto thread = startThread("mooncake-test", [] {});
  if (thread.ok()) thread->join();
  ASSERT_FALSE(thread.ok());
  EXPECT_EQ(thread.error().code, ErrorCode::kExhausted);
  EXPECT_NE(thread.error().message.find("cannot start thread mooncake-test"), std::string::npos);
  const auto loop = EventLoop::start("mooncake-loop");
  ASSERT_FALSE(loop.ok());
  EXPECT_EQ(loop.error().code, ErrorCode::kExhausted);
}

// Otherwise the engine would start its liveness thread later, and no caller would get the error.
TEST(StartThread, AnEngineThatGetsNoneDoesNotConnect) {
  if (isSanitized) GTEST_SKIP() << "the sanitizer has mapped more than any limit";
  EngineEnv env;
  env.transports = {"inproc"};
  EngineOptions options{.env = env, .logName = "test", .arenaBytes = size_t(1) << 24};
  options.jobKey = Bytes(32, std::byte{7});
  auto engine = Engine::create(std::move(options));
  ASSERT_TRUE(engine.ok()) << engine.error().message;
  const std::vector<Bytes> own{(*engine)->endpoint()};
  const Deadline deadline = Deadline::after(std::chrono::seconds(60));
  {
    const NoMoreThreads limit;
    const auto peers = (*engine)->connect(own, deadline);
    ASSERT_FALSE(peers.ok());
    EXPECT_EQ(peers.error().code, ErrorCode::kExhausted) << peers.error().message;
  }
  const auto peers = (*engine)->connect(own, deadline);
  EXPECT_TRUE(peers.ok()) << peers.error().message;
}

}  // namespace
}  // namespace mooncake
