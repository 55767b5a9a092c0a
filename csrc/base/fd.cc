#include "base/fd.h"

#include <unistd.h>

#include "base/fork.h"

namespace mooncake {

void Fd::own(int fd) {
  fd_ = fd;
  forkGeneration_ = forkGeneration();
  if (fd_ >= 0) closeOnFork(fd_);
}

void Fd::reset() {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0 || forkGeneration_ != forkGeneration()) return;
  keepOnFork(fd);  // first: once closed, the number may belong to another file
  // Linux frees the descriptor even when close() says EINTR: a second close could hit another
  // thread's file.
  ::close(fd);
}

}  // namespace mooncake
