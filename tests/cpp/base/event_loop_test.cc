#include "base/event_loop.h"

#include <array>
#include <atomic>
#include <future>
#include <gtest/gtest.h>
#include <memory>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "base/deadline.h"

namespace mooncake {
namespace {

using namespace std::chrono_literals;

constexpr auto kPatience = 20s;

Fd makeEvent(unsigned count = 0) { return Fd(::eventfd(count, EFD_CLOEXEC | EFD_NONBLOCK)); }

void raise(const Fd& event) { ASSERT_EQ(::eventfd_write(event.get(), 1), 0); }

void clear(int event) {
  eventfd_t count;
  ::eventfd_read(event, &count);
}

std::unique_ptr<EventLoop> makeLoop() {
  auto loop = EventLoop::start("mc-test-loop-with-a-long-name");
  EXPECT_TRUE(loop.ok());
  return std::move(*loop);
}

// Waits until the loop's current task and all pending ones are over.
void drain(EventLoop& loop) {
  std::promise<void> done;
  loop.post([&] { done.set_value(); });
  ASSERT_EQ(done.get_future().wait_for(kPatience), std::future_status::ready);
}

TEST(EventLoop, CallsTheHandlerWithTheEvents) {
  const auto loop = makeLoop();
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
  const Fd near(ends[0]);
  Fd far(ends[1]);
  std::promise<uint32_t> seen;
  ASSERT_TRUE(loop->add(near.get(), EPOLLIN,
                        [&](uint32_t events) {
                          loop->remove(near.get());
                          seen.set_value(events);
                        })
                  .ok());
  far.reset();
  auto events = seen.get_future();
  ASSERT_EQ(events.wait_for(kPatience), std::future_status::ready);
  EXPECT_TRUE(events.get() & EPOLLHUP);
}

TEST(EventLoop, ModifyChangesWhatIsWaitedFor) {
  const auto loop = makeLoop();
  const Fd event = makeEvent();
  std::promise<uint32_t> seen;
  ASSERT_TRUE(loop->add(event.get(), EPOLLIN,
                        [&](uint32_t events) {
                          EXPECT_TRUE(loop->modify(event.get(), 0).ok());
                          seen.set_value(events);  // a second call would throw
                        })
                  .ok());
  ASSERT_TRUE(loop->modify(event.get(), EPOLLOUT).ok());
  auto events = seen.get_future();
  ASSERT_EQ(events.wait_for(kPatience), std::future_status::ready);
  EXPECT_EQ(events.get(), uint32_t(EPOLLOUT));
  loop->remove(event.get());
}

TEST(EventLoop, RefusesWhatItCannotWatch) {
  const auto loop = makeLoop();
  const Fd event = makeEvent();
  EXPECT_EQ(loop->add(-1, EPOLLIN, [](uint32_t) {}).code(), ErrorCode::kSystem);
  EXPECT_EQ(loop->modify(event.get(), EPOLLIN).code(), ErrorCode::kInvalidArgument);
  loop->remove(event.get());
  ASSERT_TRUE(loop->add(event.get(), EPOLLIN, [](uint32_t) {}).ok());
  EXPECT_EQ(loop->add(event.get(), EPOLLIN, [](uint32_t) {}).code(), ErrorCode::kSystem);
  loop->remove(event.get());
}

TEST(EventLoop, RunsTasksInOrderOnItsThreadAndBeforeItEnds) {
  std::vector<int> order;
  {
    const auto loop = makeLoop();
    EXPECT_FALSE(loop->onLoopThread());
    for (int i = 0; i < 100; ++i) {
      loop->post([&order, i, raw = loop.get()] {
        if (raw->onLoopThread()) order.push_back(i);
        if (i == 99) raw->post([&order] { order.push_back(100); });
      });
    }
  }
  ASSERT_EQ(order.size(), 101u);
  for (int i = 0; i <= 100; ++i) EXPECT_EQ(order[i], i);
}

TEST(EventLoop, EveryTaskOfManyThreadsRuns) {
  const auto loop = makeLoop();
  std::atomic<int> ran{0};
  std::vector<std::thread> posters;
  for (int i = 0; i < 4; ++i) {
    posters.emplace_back([&] {
      for (int k = 0; k < 5000; ++k)
        loop->post([&] { ran.fetch_add(1, std::memory_order_relaxed); });
    });
  }
  for (auto& poster : posters) poster.join();
  drain(*loop);
  EXPECT_EQ(ran, 20000);
}

TEST(EventLoop, TimersRunInTheirOrderUnlessCancelled) {
  auto loop = std::move(*EventLoop::start("timers"));
  std::vector<int> ran;  // by the loop's thread only, until it is over
  std::promise<void> last;
  const auto now = Clock::now();
  const auto at = [&](int ms) { return Deadline::at(now + std::chrono::milliseconds(ms)); };
  loop->runAt(at(40), [&] { last.set_value(); });
  loop->runAt(at(20), [&] { ran.push_back(20); });
  loop->runAt(at(10), [&] {
    ran.push_back(10);
    const auto cancelled = loop->runAt(at(30), [&] { ran.push_back(30); });
    loop->runAt(at(0), [&] { ran.push_back(0); });
    loop->cancel(cancelled);
    loop->cancel(cancelled);
  });
  loop->runAt(at(3600 * 1000), [&] { ran.push_back(-1); });
  last.get_future().wait();
  EXPECT_GE(Clock::now() - now, std::chrono::milliseconds(40));
  loop.reset();
  EXPECT_EQ(ran, (std::vector<int>{10, 0, 20}));
}

TEST(EventLoop, RemoveWaitsForTheRunningHandler) {
  const auto loop = makeLoop();
  const Fd event = makeEvent(1);
  std::promise<void> entered;
  std::promise<void> mayLeave;
  std::atomic<bool> left{false};
  ASSERT_TRUE(loop->add(event.get(), EPOLLIN,
                        [&, go = mayLeave.get_future().share()](uint32_t) {
                          entered.set_value();
                          go.wait();
                          left = true;
                        })
                  .ok());
  entered.get_future().wait();
  std::atomic<bool> leftBeforeRemoved{false};
  std::thread remover([&] {
    loop->remove(event.get());
    leftBeforeRemoved = left.load();
  });
  // modify() fails once the remover has taken the registration out: from then on it waits for the
  // handler.
  const Deadline deadline = Deadline::after(kPatience);
  while (loop->modify(event.get(), EPOLLIN).ok() && !deadline.passed()) std::this_thread::yield();
  mayLeave.set_value();
  remover.join();
  EXPECT_TRUE(leftBeforeRemoved);
}

TEST(EventLoop, AHandlerMayRemoveItselfAndOthers) {
  const auto loop = makeLoop();
  const std::array<Fd, 2> events = {makeEvent(), makeEvent()};
  std::atomic<int> calls{0};
  const auto alive = std::make_shared<int>(0);
  std::promise<void> done;
  for (const Fd& event : events) {
    ASSERT_TRUE(loop->add(event.get(), EPOLLIN,
                          [&, alive](uint32_t) {
                            for (const Fd& each : events) loop->remove(each.get());
                            EXPECT_GE(alive.use_count(), 2) << "destroyed while it runs";
                            if (++calls == 1) done.set_value();
                          })
                    .ok());
  }
  // Both become ready within one task, so that one epoll_wait reports both.
  loop->post([&] {
    for (const Fd& event : events) raise(event);
  });
  ASSERT_EQ(done.get_future().wait_for(kPatience), std::future_status::ready);
  drain(*loop);
  EXPECT_EQ(calls, 1) << "an event of a removed handler was delivered";
  EXPECT_EQ(alive.use_count(), 1) << "handlers must not outlive their removal";
}

TEST(EventLoop, ALateEventDoesNotReachTheNextOwnerOfADescriptor) {
  const auto loop = makeLoop();
  const std::array<Fd, 2> events = {makeEvent(), makeEvent()};
  std::atomic<int> first{0};
  std::atomic<int> next{0};
  for (int me = 0; me < 2; ++me) {
    ASSERT_TRUE(loop->add(events[me].get(), EPOLLIN,
                          [&, me](uint32_t) {
                            ++first;
                            const int other = events[1 - me].get();
                            loop->remove(events[me].get());
                            loop->remove(other);
                            clear(other);
                            EXPECT_TRUE(loop->add(other, EPOLLIN, [&](uint32_t) { ++next; }).ok());
                          })
                    .ok());
  }
  loop->post([&] {
    for (const Fd& event : events) raise(event);
  });
  const Deadline deadline = Deadline::after(kPatience);
  while (first == 0 && !deadline.passed()) std::this_thread::yield();
  drain(*loop);
  EXPECT_EQ(first, 1);
  EXPECT_EQ(next, 0);
  for (const Fd& event : events) loop->remove(event.get());
}

// The same descriptor number comes and goes while events are under way. After remove() the
// handler's data is gone (the sanitizers watch), and an event must not reach the next owner of the
// number.
TEST(EventLoop, AddAndRemoveInAHurry) {
  const auto loop = makeLoop();
  for (int round = 0; round < 3000; ++round) {
    const Fd event = makeEvent(1);
    auto calls = std::make_unique<std::atomic<int>>(0);
    ASSERT_TRUE(loop->add(event.get(), EPOLLIN,
                          [fd = event.get(), raw = calls.get()](uint32_t) {
                            ++*raw;
                            clear(fd);
                          })
                    .ok());
    if (round % 3 == 0) {
      const Deadline deadline = Deadline::after(kPatience);
      while (*calls == 0 && !deadline.passed()) std::this_thread::yield();
      EXPECT_GE(*calls, 1);
    }
    loop->remove(event.get());
    EXPECT_LE(*calls, 1);
  }
}

TEST(EventLoop, ItsThreadIsNamedAndDeafToSignals) {
  const auto loop = makeLoop();
  std::array<char, 16> name{};
  sigset_t blocked;
  sigset_t ours;
  std::promise<void> done;
  loop->post([&] {
    ::pthread_getname_np(::pthread_self(), name.data(), name.size());
    ::pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    done.set_value();
  });
  ASSERT_EQ(done.get_future().wait_for(kPatience), std::future_status::ready);
  EXPECT_STREQ(name.data(), "mc-test-loop-wi");
  for (const int signal : {SIGINT, SIGTERM, SIGCHLD, SIGUSR1})
    EXPECT_EQ(sigismember(&blocked, signal), 1);
  EXPECT_EQ(sigismember(&blocked, SIGSEGV), 0);
  ::pthread_sigmask(SIG_SETMASK, nullptr, &ours);
  EXPECT_EQ(sigismember(&ours, SIGINT), 0) << "the caller's mask must be as before";
}

}  // namespace
}  // namespace mooncake
