#include "base/descriptors.h"

#include <dirent.h>
#include <memory>
#include <sys/resource.h>

namespace mooncake {
namespace {

// Kept free for descriptors that we or the program open in the meantime.
constexpr size_t kReserve = 32;

rlimit limits() {
  rlimit limits{};
  ::getrlimit(RLIMIT_NOFILE, &limits);
  return limits;
}

std::string textOf(rlim_t limit) {
  return limit == RLIM_INFINITY ? "unlimited" : std::to_string(limit);
}

size_t openDescriptors() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/fd"), ::closedir);
  if (!folder) return 0;
  size_t count = 0;
  while (const dirent* entry = ::readdir(folder.get())) count += entry->d_name[0] != '.';
  return count - 1;  // not the descriptor of the folder itself
}

}  // namespace

void raiseDescriptorLimit() {
  rlimit wanted = limits();
  if (wanted.rlim_cur == wanted.rlim_max) return;
  wanted.rlim_cur = wanted.rlim_max;
  (void)::setrlimit(RLIMIT_NOFILE, &wanted);  // a failure shows when the limit is reached
}

Status checkDescriptors(size_t more, const std::string& what) {
  if (more == 0) return {};
  const size_t open = openDescriptors(), needed = open + more + kReserve;
  if (needed <= limits().rlim_cur) return {};
  return {ErrorCode::kExhausted, what + " takes " + std::to_string(more) + " file descriptors, " +
                                     std::to_string(needed) + " with the " + std::to_string(open) +
                                     " that are open and some to spare; " +
                                     describeDescriptorLimit()};
}

std::string describeDescriptorLimit() {
  const rlimit now = limits();
  return "this process may have " + textOf(now.rlim_cur) + " (hard limit " + textOf(now.rlim_max) +
         "): raise it with ulimit -n, LimitNOFILE= of the service or --ulimit nofile= of "
         "the container";
}

}  // namespace mooncake
