#include "processes.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "clock.h"

namespace probe {
namespace {

constexpr long kReceiveSeconds = 10;
constexpr double kKilledSeconds = 5;  // a process in the driver may take some time to die

}  // namespace

pid_t start(const std::function<void()>& run, bool leadsGroup) {
  std::fflush(stdout);
  const pid_t parent = ::getpid();
  const pid_t process = CHECKED_SYSTEM(::fork());
  if (process != 0) return process;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(kFailed);
  if (leadsGroup) ::setpgid(0, 0);
  run();
  std::fflush(stdout);
  ::_exit(kDone);
}

int finish(pid_t process, double seconds) {
  int status = 0;
  bool isKilled = false;
  for (auto begin = Clock::now();;) {
    const pid_t ended = ::waitpid(process, &status, WNOHANG);
    if (ended == process) return isKilled ? -1 : status;
    if (millisecondsSince(begin) > seconds * 1e3) {
      if (isKilled) return -1;
      ::kill(-process, SIGKILL);
      ::kill(process, SIGKILL);
      isKilled = true;
      seconds = kKilledSeconds;
      begin = Clock::now();
    }
    ::usleep(1000);
  }
}

Link makeLink() {
  int ends[2];
  CHECKED_SYSTEM(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
  const timeval limit{.tv_sec = kReceiveSeconds, .tv_usec = 0};
  for (int end : ends)
    CHECKED_SYSTEM(::setsockopt(end, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)));
  return {.near = ends[0], .far = ends[1]};
}

void sendDescriptor(int to, int descriptor) {
  char byte = 0;
  iovec data{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  CHECKED_SYSTEM(int(::sendmsg(to, &message, MSG_NOSIGNAL)));
}

int receiveDescriptor(int from) {
  char byte = 0;
  iovec data{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  CHECKED_SYSTEM(int(::recvmsg(from, &message, 0)));
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  int descriptor = -1;
  errno = ECONNRESET;  // the other end has closed the link without a descriptor
  if (header != nullptr) std::memcpy(&descriptor, CMSG_DATA(header), sizeof(int));
  return CHECKED_SYSTEM(descriptor);
}

void sendBytes(int to, const void* bytes, size_t count) {
  CHECKED_SYSTEM(int(::send(to, bytes, count, MSG_NOSIGNAL)));
}

void receiveBytes(int from, void* bytes, size_t count) {
  errno = ECONNRESET;
  const bool isThere = ::recv(from, bytes, count, MSG_WAITALL) == ssize_t(count);
  CHECKED_SYSTEM(isThere ? 0 : -1);
}

}  // namespace probe
