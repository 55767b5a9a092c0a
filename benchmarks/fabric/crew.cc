#include "fabric/crew.h"

#include <arpa/inet.h>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

#include "base/deadline.h"

namespace mooncake::bench {
namespace {

constexpr size_t kMostBytes = 1 << 20;
constexpr std::chrono::seconds kMeeting{60};

void sendAll(int socket, ByteView bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) die("another rank has gone");
    bytes = bytes.subspan(static_cast<size_t>(sent));
  }
}

void receiveAll(int socket, std::span<std::byte> into) {
  while (!into.empty()) {
    const ssize_t got = ::recv(socket, into.data(), into.size(), 0);
    if (got <= 0) die("another rank has gone");
    into = into.subspan(static_cast<size_t>(got));
  }
}

void sendOne(const Fd& socket, ByteView message) {
  sendAll(socket.get(), ByteWriter().putBytes(message).take());
}

Bytes receiveOne(const Fd& socket) {
  uint32_t length = 0;
  receiveAll(socket.get(), std::as_writable_bytes(std::span(&length, 1)));
  if (length > kMostBytes) die("that is no rank of this program");
  Bytes message(length);
  receiveAll(socket.get(), message);
  return message;
}

sockaddr_in resolve(const std::string& meetingPoint) {
  const size_t colon = meetingPoint.rfind(':');
  if (colon == std::string::npos) die("a meeting point is HOST:PORT");
  addrinfo hints{.ai_family = AF_INET, .ai_socktype = SOCK_STREAM};
  addrinfo* found = nullptr;
  const std::string host = meetingPoint.substr(0, colon), port = meetingPoint.substr(colon + 1);
  if (::getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0)
    die("no such host: " + meetingPoint);
  sockaddr_in address;
  std::memcpy(&address, found->ai_addr, sizeof(address));
  ::freeaddrinfo(found);
  return address;
}

Fd newSocket() {
  Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  return socket;
}

}  // namespace

void die(const std::string& message) {
  std::fprintf(stderr, "fabric_bench: %s\n", message.c_str());
  std::_Exit(1);
}

Crew::Crew(int rank, int size, const std::string& meetingPoint)
    : rank_(rank), size_(static_cast<size_t>(size)) {
  if (size == 1) return;
  const sockaddr_in address = resolve(meetingPoint);
  const auto* generic = reinterpret_cast<const sockaddr*>(&address);
  const auto deadline = Deadline::after(kMeeting);
  if (rank == 0) {
    const Fd listener = newSocket();
    if (::bind(listener.get(), generic, sizeof(address)) != 0 ||
        ::listen(listener.get(), size) != 0)
      die("cannot listen at " + meetingPoint + ": " + std::strerror(errno));
    const timeval patience{kMeeting.count(), 0};
    ::setsockopt(listener.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    others_.resize(size_);
    for (size_t met = 1; met < size_; ++met) {
      Fd caller(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!caller) die("not all ranks came to " + meetingPoint);
      const Bytes hello = receiveOne(caller);
      ByteReader in(hello);
      const auto who = in.get<uint32_t>();
      if (who == 0 || who >= size_ || others_[who]) die("a rank came twice");
      others_[who] = std::move(caller);
    }
  } else {
    for (;;) {
      Fd socket = newSocket();
      if (::connect(socket.get(), generic, sizeof(address)) == 0) {
        others_.push_back(std::move(socket));
        break;
      }
      if (deadline.passed()) die("nobody is at " + meetingPoint);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    sendOne(others_[0], ByteWriter().put(static_cast<uint32_t>(rank)).take());
  }
}

std::vector<Bytes> Crew::exchange(ByteView mine) {
  std::vector<Bytes> all(size_);
  if (rank_ != 0) {
    sendOne(others_[0], mine);
    for (Bytes& one : all) one = receiveOne(others_[0]);
    return all;
  }
  all[0].assign(mine.begin(), mine.end());
  for (size_t r = 1; r < size_; ++r) all[r] = receiveOne(others_[r]);
  for (size_t r = 1; r < size_; ++r) {
    for (const Bytes& one : all) sendOne(others_[r], one);
  }
  return all;
}

std::string startOthers(int size, char** arguments) {
  const Fd probe = newSocket();
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (::bind(probe.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::getsockname(probe.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0)
    die("no free port");
  const std::string at = "127.0.0.1:" + std::to_string(::ntohs(address.sin_port));
  const pid_t parent = ::getpid();
  for (int rank = 1; rank < size; ++rank) {
    std::vector<std::string> words;
    for (char** word = arguments; *word; ++word) words.emplace_back(*word);
    words.insert(words.end(), {"--rank", std::to_string(rank), "--meet", at});
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    // fork() is safe: there is only one thread yet.
    const pid_t child = ::fork();
    if (child < 0) die("fork");
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) std::_Exit(1);
      ::execv("/proc/self/exe", pointers.data());
      std::_Exit(1);
    }
  }
  return at;
}

}  // namespace mooncake::bench
