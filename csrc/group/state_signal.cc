// Writes the states of all groups when a signal asks for them.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <sstream>
#include <sys/eventfd.h>
#include <unistd.h>
#include <vector>

#include "base/fork.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/thread.h"
#include "group/group.h"
#include "group/group_state.h"

namespace mooncake {
namespace {

struct Listed {
  Mutex mutex;  // also keeps the groups from going while they are described
  std::vector<const Group*> groups GUARDED_BY(mutex);
};

// Never destroyed: the thread may outlast static objects.
Listed& listed() {
  static Listed& all = *new Listed;
  return all;
}

// The handler's data. The handler may call async-signal-safe functions only.
std::atomic<int> wakeUp{-1};
std::atomic<uint32_t> madeIn{0};

void onSignal(int) {
  const int before = errno;
  const int fd = wakeUp.load(std::memory_order_acquire);
  // A forked child has no thread that would answer, and may use the descriptor's number for another
  // file.
  if (fd >= 0 && forkGeneration() == madeIn.load(std::memory_order_relaxed)) {
    const uint64_t once = 1;
    [[maybe_unused]] const auto written = ::write(fd, &once, sizeof(once));
  }
  errno = before;
}

void describeAll() {
  Listed& all = listed();
  Lock lock(all.mutex);
  for (const Group* group : all.groups) {
    std::istringstream lines(describeState(*group));
    // The user asked for these lines, so they are written at every log level.
    for (std::string line; std::getline(lines, line);)
      logLine(LogLevel::kInfo, group->engine().logName(), line);
  }
  if (all.groups.empty()) logLine(LogLevel::kInfo, "state", "this process has no group");
}

void answerSignals(int fd) {
  for (;;) {
    uint64_t times = 0;
    if (::read(fd, &times, sizeof(times)) == sizeof(times)) describeAll();
  }
}

// Starts the answering thread, once per process. It is detached and ends with the process.
Status startAnswering() {
  if (wakeUp.load() >= 0 && madeIn.load() == forkGeneration()) return {};
  const int fd = ::eventfd(0, EFD_CLOEXEC);
  if (fd < 0) return systemError("eventfd", errno);
  auto thread = startThread("mooncake-state", [fd] { answerSignals(fd); });
  if (!thread.ok()) {
    ::close(fd);
    return thread.error();
  }
  thread->detach();
  closeOnFork(fd);
  madeIn.store(forkGeneration());
  wakeUp.store(fd, std::memory_order_release);
  return {};
}

}  // namespace

ListedGroup::ListedGroup(const Group& group) : group_(group) {
  Lock lock(listed().mutex);
  listed().groups.push_back(&group);
}

ListedGroup::~ListedGroup() {
  Lock lock(listed().mutex);
  std::erase(listed().groups, &group_);
}

Status describeStatesOnSignal(int signal) {
  static Mutex& one = *new Mutex;
  Lock lock(one);
  const std::string name = "signal " + std::to_string(signal);
  struct sigaction before {};
  if (::sigaction(signal, nullptr, &before) != 0)
    return {ErrorCode::kInvalidArgument, name + " is not a signal that can be handled"};
  const bool isOurs = !(before.sa_flags & SA_SIGINFO) && before.sa_handler == onSignal;
  if (!isOurs && ((before.sa_flags & SA_SIGINFO) || before.sa_handler != SIG_DFL)) {
    return {ErrorCode::kInvalidArgument,
            name +
                " has a handler already, or is ignored, and stays as it is: choose another "
                "signal"};
  }
  MOONCAKE_TRY(startAnswering());
  struct sigaction ours {};
  ours.sa_handler = onSignal;
  ours.sa_flags = SA_RESTART;
  if (::sigaction(signal, &ours, nullptr) != 0)
    return {ErrorCode::kInvalidArgument, name + " is not a signal that can be handled"};
  return {};
}

}  // namespace mooncake
