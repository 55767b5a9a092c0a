#include "base/thread.h"

#include <exception>
#include <pthread.h>
#include <utility>

#include "base/signals.h"

namespace mooncake {

Result<std::thread> startThread(const std::string& name, std::function<void()> body,
                                ThreadName named) {
  constexpr size_t kKept = 15;
  std::thread thread;
  try {
    const BlockedSignals blocked;
    thread = std::thread(std::move(body));
  } catch (const std::exception& error) {  // std::system_error, std::bad_alloc
    return Error{ErrorCode::kExhausted,
                 "cannot start thread " + name + ": " + error.what() +
                     ". Raise the limit of processes (ulimit -u, pids.max of the cgroup) or of "
                     "memory (ulimit -v)"};
  }
  if (named == ThreadName::kGiven)
    ::pthread_setname_np(thread.native_handle(), name.substr(0, kKept).c_str());
  return thread;
}

}  // namespace mooncake
