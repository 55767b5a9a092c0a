#include "base/unix_socket.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

namespace mooncake {
namespace {

struct Address {
  sockaddr_un raw{};
  socklen_t length = 0;
};

Result<Address> abstractAddress(const std::string& name) {
  Address address;
  if (name.empty() || name.size() + 1 > sizeof(address.raw.sun_path)) {
    return Error{ErrorCode::kInvalidArgument, "not a name for a unix socket: '" + name + "'"};
  }
  address.raw.sun_family = AF_UNIX;
  std::memcpy(address.raw.sun_path + 1, name.data(),
              name.size());  // a leading 0 makes it abstract
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

const sockaddr* generic(const Address& address) {
  return reinterpret_cast<const sockaddr*>(&address.raw);
}

}  // namespace

Result<Fd> listenAbstract(const std::string& name) {
  const auto address = abstractAddress(name);
  if (!address.ok()) return address.error();
  Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return systemError("socket(AF_UNIX)", errno);
  if (::bind(socket.get(), generic(*address), address->length) != 0) {
    return systemError("bind(@" + name + ")", errno);
  }
  if (::listen(socket.get(), SOMAXCONN) != 0) return systemError("listen(@" + name + ")", errno);
  return socket;
}

Result<Fd> connectAbstract(const std::string& name, Deadline deadline) {
  const auto address = abstractAddress(name);
  if (!address.ok()) return address.error();
  Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) return systemError("socket(AF_UNIX)", errno);
  // A unix connect waits only for room in the listener's backlog, and SO_SNDTIMEO bounds that (0
  // would mean for ever). A non-blocking connect would not work: poll() does not tell when the
  // backlog has room.
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::microseconds>(deadline.left());
    const auto bound = std::clamp<int64_t>(left.count(), 1000, int64_t(3600) * 1000000);
    const timeval limit{.tv_sec = bound / 1000000, .tv_usec = bound % 1000000};
    if (::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)) != 0) {
      return systemError("setsockopt(SO_SNDTIMEO)", errno);
    }
    if (::connect(socket.get(), generic(*address), address->length) == 0) break;
    if (errno == ECONNREFUSED) {
      return Error{ErrorCode::kUnsupported, "nobody listens at @" + name +
                                                " here: another host or another network namespace"};
    }
    if (errno == EAGAIN && deadline.passed()) {
      return Error{ErrorCode::kTimeout, "@" + name + " did not accept a connection in time"};
    }
    if (errno != EINTR && errno != EAGAIN) return systemError("connect(@" + name + ")", errno);
  }
  return socket;
}

pid_t peerProcess(int socket) {
  ucred who{};
  socklen_t length = sizeof(who);
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &length) == 0 ? who.pid : 0;
}

Status sendWithFd(int socket, ByteView message, int fd) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  iovec part{const_cast<std::byte*>(message.data()), message.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  cmsghdr* attached = CMSG_FIRSTHDR(&header);
  attached->cmsg_level = SOL_SOCKET;
  attached->cmsg_type = SCM_RIGHTS;
  attached->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(attached), &fd, sizeof(int));
  ssize_t sent;
  do {
    sent = ::sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) return systemError("sendmsg of a descriptor", errno);
  if (static_cast<size_t>(sent) != message.size()) {
    return Error{ErrorCode::kSystem, "a unix socket took only a part of a short message"};
  }
  return {};
}

Result<size_t> receiveWithFd(int socket, size_t atMost, Bytes& message, Fd& fd) {
  const size_t before = message.size();
  message.resize(before + atMost);
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  iovec part{message.data() + before, atMost};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  // Room for exactly one descriptor. CMSG_SPACE would round up to two; the kernel closes
  // descriptors that do not fit.
  header.msg_controllen = CMSG_LEN(sizeof(int));
  ssize_t got;
  do {
    got = ::recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  const int cause = errno;
  message.resize(before + static_cast<size_t>(std::max<ssize_t>(got, 0)));
  if (got < 0 && (cause == EAGAIN || cause == EWOULDBLOCK)) return size_t(0);
  if (got < 0) return systemError("recvmsg", cause);
  if (const cmsghdr* attached = CMSG_FIRSTHDR(&header);
      attached && attached->cmsg_level == SOL_SOCKET && attached->cmsg_type == SCM_RIGHTS) {
    int received;
    std::memcpy(&received, CMSG_DATA(attached), sizeof(int));
    fd = Fd(received);
  }
  if (got == 0) return Error{ErrorCode::kPeerLost, "the peer closed the connection"};
  return static_cast<size_t>(got);
}

}  // namespace mooncake
