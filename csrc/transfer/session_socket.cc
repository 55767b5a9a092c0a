#include "transfer/session_socket.h"

#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <chrono>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <random>
#include <sys/socket.h>
#include <vector>

namespace mooncake::transfer {
namespace {

constexpr int kBacklog = 128;

struct Address {
  sockaddr_storage storage{};
  socklen_t bytes = 0;

  int family() const { return storage.ss_family; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  // 127.0.1.1 and the like: some hosts give it to their own name, and no other host can reach it.
  bool isOddLoopback() const {
    if (family() != AF_INET) return false;
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(storage);
    const uint32_t raw = ntohl(v4.sin_addr.s_addr);
    return raw >> 24 == 127 && raw != INADDR_LOOPBACK;
  }
  void setPort(uint16_t port) {
    if (family() == AF_INET) {
      reinterpret_cast<sockaddr_in&>(storage).sin_port = htons(port);
    } else {
      reinterpret_cast<sockaddr_in6&>(storage).sin6_port = htons(port);
    }
  }
  std::string text() const {
    char digits[NI_MAXHOST] = "";
    ::getnameinfo(get(), bytes, digits, sizeof digits, nullptr, 0, NI_NUMERICHOST);
    return digits;
  }
};

Address addressFrom(const sockaddr* from, socklen_t bytes) {
  Address address;
  std::copy_n(reinterpret_cast<const char*>(from), bytes,
              reinterpret_cast<char*>(&address.storage));
  address.bytes = bytes;
  return address;
}

// Resolves a name, IPv4 addresses first. This is the only wait without our own deadline: the
// resolver has its own.
Result<std::vector<Address>> resolve(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int failed = ::getaddrinfo(host.c_str(), nullptr, &hints, &found); failed != 0) {
    return Error{ErrorCode::kSystem, "host \"" + host + "\": " + ::gai_strerror(failed)};
  }
  std::vector<Address> addresses;
  for (const addrinfo* one = found; one; one = one->ai_next) {
    if (one->ai_family == AF_INET || one->ai_family == AF_INET6)
      addresses.push_back(addressFrom(one->ai_addr, one->ai_addrlen));
  }
  ::freeaddrinfo(found);
  std::stable_sort(addresses.begin(), addresses.end(), [](const Address& a, const Address& b) {
    return a.family() == AF_INET && b.family() != AF_INET;
  });
  return addresses;
}

bool isInDigits(const std::string& host) {
  in6_addr raw;
  return ::inet_pton(AF_INET, host.c_str(), &raw) == 1 ||
         ::inet_pton(AF_INET6, host.c_str(), &raw) == 1;
}

Result<Fd> tryListen(Address address, uint16_t port) {
  Fd socket(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return systemError("socket", errno);
  const int on = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  address.setPort(port);
  if (::bind(socket.get(), address.get(), address.bytes) != 0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    return Error{
        errno == EADDRNOTAVAIL ? ErrorCode::kInvalidArgument : ErrorCode::kExhausted,
        systemError("bind(" + SessionId{address.text(), port}.text() + ")", errno).message};
  }
  return socket;
}

// Starts at a random port, so that engines that start together do not all try the same ports.
Result<SessionListener> listenAt(const Address& address, uint16_t least, uint16_t most) {
  const uint32_t count = uint32_t(most) - least + 1;
  const uint32_t first = std::random_device{}() % count;
  Error last;
  for (uint32_t step = 0; step < count; ++step) {
    const auto port = static_cast<uint16_t>(least + (first + step) % count);
    auto socket = tryListen(address, port);
    if (socket.ok()) return SessionListener{std::move(*socket), address.text(), port};
    last = socket.error();
    if (last.code == ErrorCode::kInvalidArgument) break;
  }
  return last;
}

// The first address that other hosts can reach, IPv4 before IPv6; loopback if there is no other.
Result<Address> firstOfHost() {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return systemError("getifaddrs", errno);
  std::vector<std::pair<int, Address>> found;
  for (const ifaddrs* one = all; one; one = one->ifa_next) {
    if (!one->ifa_addr || !(one->ifa_flags & IFF_UP)) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const bool isLocalLink =
        family == AF_INET6 &&
        IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr);
    if (isLocalLink) continue;
    const int rank = (one->ifa_flags & IFF_LOOPBACK ? 2 : 0) + (family == AF_INET6 ? 1 : 0);
    found.emplace_back(rank, addressFrom(one->ifa_addr, family == AF_INET ? sizeof(sockaddr_in)
                                                                          : sizeof(sockaddr_in6)));
  }
  ::freeifaddrs(all);
  const auto best = std::min_element(
      found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  if (best == found.end()) return Error{ErrorCode::kSystem, "this host has no address"};
  return best->second;
}

}  // namespace

Status await(int socket, short events, Deadline deadline, const StopSignal* stop) {
  for (;;) {
    // poll() ignores a negative descriptor.
    pollfd both[] = {{.fd = socket, .events = events, .revents = 0},
                     {.fd = stop ? stop->descriptor() : -1, .events = POLLIN, .revents = 0}};
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.left()).count();
    const int ready = ::poll(both, 2, int(std::min<int64_t>(left, 1000)));
    if (ready > 0 && both[1].revents != 0) return {ErrorCode::kAborted, "the engine is closed"};
    if (ready > 0) return {};
    if (ready < 0 && errno != EINTR) return systemError("poll", errno);
    if (deadline.passed()) return {ErrorCode::kTimeout, "no answer in time"};
  }
}

Result<SessionListener> listenForSessions(const EngineEnv& env, const TransferEnv& settings,
                                          const std::string& host, bool isAddress, uint16_t port) {
  const uint16_t least = port ? port : settings.leastRpcPort,
                 most = port ? port : settings.mostRpcPort;
  std::string wanted = env.hostIp ? *env.hostIp : settings.tcpBindAddress.value_or(host);
  const bool isFixed = env.hostIp || settings.tcpBindAddress || (isAddress && isInDigits(host));
  if (!wanted.empty()) {
    auto addresses = resolve(wanted);
    if (!addresses.ok() && isFixed) return addresses.error();
    Error last{ErrorCode::kInvalidArgument, "\"" + wanted + "\" is no address of this host"};
    if (addresses.ok()) {
      for (const Address& address : *addresses) {
        if (!isFixed && address.isOddLoopback()) continue;
        auto listener = listenAt(address, least, most);
        if (listener.ok()) return listener;
        last = listener.error();
        if (last.code != ErrorCode::kInvalidArgument) return last;
      }
    }
    if (isFixed) {
      const bool isBound = !env.hostIp && settings.tcpBindAddress;
      return Error{last.code, last.message + ": set " +
                                  (isBound ? "MC_TCP_BIND_ADDRESS" : "MOONCAKE_HOST_IP") +
                                  " to an address of this host"};
    }
  }
  const auto address = firstOfHost();
  if (!address.ok()) return address.error();
  return listenAt(*address, least, most);
}

Result<Fd> connectTo(const SessionId& where, Deadline deadline, const StopSignal* stop) {
  const auto addresses = resolve(where.host);
  if (!addresses.ok()) return addresses.error();
  Error why{ErrorCode::kSystem, "host \"" + where.host + "\" has no address"};
  // A refusal at one address must not hide that another one cannot be reached.
  const auto note = [&](ErrorCode code, std::string cause) {
    if (why.code != ErrorCode::kTimeout) why = {code, std::move(cause)};
  };
  for (Address address : *addresses) {
    address.setPort(where.port);
    Fd socket(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket) return Error{ErrorCode::kExhausted, systemError("socket", errno).message};
    const int on = 1;
    ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    int failure = ::connect(socket.get(), address.get(), address.bytes) == 0 ? 0 : errno;
    if (failure == EINPROGRESS) {
      if (const Status ready = await(socket.get(), POLLOUT, deadline, stop); !ready.ok()) {
        if (ready.code() == ErrorCode::kAborted) return ready.error();
        note(ErrorCode::kTimeout, where.text() + ": " + ready.error().message);
        continue;
      }
      socklen_t bytes = sizeof failure;
      ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &failure, &bytes);
    }
    if (failure == 0) return socket;
    note(failure == ECONNREFUSED ? ErrorCode::kPeerLost : ErrorCode::kTimeout,
         systemError("connect(" + where.text() + ")", failure).message);
  }
  return why;
}

}  // namespace mooncake::transfer
