#include "base/failpoint.h"

#include <chrono>
#include <csignal>
#include <list>
#include <string>
#include <thread>

namespace mooncake {
namespace {

struct Armed {
  Armed(std::string_view name, uint32_t nth, FailpointAction action,
        std::chrono::milliseconds delay)
      : name(name), left(nth), action(action), delay(delay) {}

  const std::string name;
  std::atomic<uint32_t> left;
  const FailpointAction action;
  const std::chrono::milliseconds delay;
};

// Global, because a failpoint ends the whole process. Not changed once other threads may reach a
// failpoint that is on.
std::list<Armed> armed;
void (*observer)(const char*) = nullptr;

void act(const Armed& point) {
  switch (point.action) {
    case FailpointAction::kKill:
      // raise() signals this thread, so it never returns from the call.
      std::raise(SIGKILL);
      return;
    case FailpointAction::kStop:
      std::raise(SIGSTOP);
      return;
    case FailpointAction::kDelay:
      std::this_thread::sleep_for(point.delay);
      return;
  }
}

}  // namespace

void hitFailpoint(const char* name) {
  // Acquire: entries armed before the flag was set are visible.
  if (!areFailpointsOn.load(std::memory_order_acquire)) return;
  if (observer) observer(name);
  for (Armed& point : armed) {
    if (point.name == name && point.left.fetch_sub(1, std::memory_order_relaxed) == 1) act(point);
  }
}

void armFailpoint(std::string_view name, uint32_t nth, FailpointAction action,
                  uint32_t delayMilliseconds) {
  armed.emplace_back(name, nth, action, std::chrono::milliseconds(delayMilliseconds));
  areFailpointsOn.store(true, std::memory_order_release);
}

void observeFailpoints(void (*toCall)(const char* name)) {
  observer = toCall;
  areFailpointsOn.store(true, std::memory_order_release);
}

}  // namespace mooncake
