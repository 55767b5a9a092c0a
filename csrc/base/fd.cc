#include "base/fd.h"

#include <unistd.h>

namespace mooncake {

void Fd::reset(int fd) {
  // Linux frees the descriptor even when close() says EINTR: a second close could hit another
  // thread's file.
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

}  // namespace mooncake
