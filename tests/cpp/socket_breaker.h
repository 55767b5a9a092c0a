#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <random>
#include <string>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

namespace mooncake::test {

// Breaks TCP connections of this process while they are in use, as `ss -K` does, or a firewall that
// has forgotten them.
class SocketBreaker {
 public:
  enum class How { kReset, kHangUp };

  // A duplicate of another owner's socket: it stays this socket, even if the owner closes its own
  // number. Made by system calls that ThreadSanitizer does not see, as it takes each number for one
  // object.
  class Held {
   public:
    explicit Held(int number) : fd_(static_cast<int>(::syscall(SYS_dup, number))) {}
    Held(Held&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Held& operator=(Held&& other) noexcept {
      std::swap(fd_, other.fd_);
      return *this;
    }
    ~Held() {
      if (fd_ >= 0) ::syscall(SYS_close, fd_);
    }
    int get() const { return fd_; }

   private:
    int fd_;
  };

  // Returns all connected sockets; a connection within this process counts twice.
  static std::vector<Held> connections() {
    std::vector<Held> found;
    std::vector<int> numbers;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
      numbers.push_back(std::atoi(entry.path().filename().c_str()));
    // The folder's own descriptor is closed by now. Its number is about to be one of a Held.
    std::erase_if(numbers, [](int number) { return ::syscall(SYS_fcntl, number, F_GETFD) < 0; });
    for (const int number : numbers) {
      Held held(number);
      if (held.get() < 0) continue;
      int listens = 1;
      socklen_t length = sizeof(listens);
      if (::syscall(SYS_getsockopt, held.get(), SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) !=
              0 ||
          listens)
        continue;
      sockaddr_storage peer{};
      length = sizeof(peer);
      if (::syscall(SYS_getpeername, held.get(), &peer, &length) != 0) continue;
      if (peer.ss_family == AF_INET || peer.ss_family == AF_INET6) found.push_back(std::move(held));
    }
    return found;
  }

  static void breakOne(const Held& connection, How how) {
    if (how == How::kHangUp) {
      ::syscall(SYS_shutdown, connection.get(), SHUT_RDWR);
      return;
    }
    // Sends a reset; the users of the socket get ECONNRESET.
    sockaddr nobody{};
    nobody.sa_family = AF_UNSPEC;
    ::syscall(SYS_connect, connection.get(), &nobody, sizeof(nobody));
  }

  static size_t breakAll(How how) {
    const auto all = connections();
    for (const Held& one : all) breakOne(one, how);
    return all.size();
  }
};

// Breaks one connection after the other, chosen by the seed, until it is destroyed. It mostly waits
// until the broken connections have been made again. Otherwise a slow machine would never have all
// of its connections.
class Troublemaker {
 public:
  Troublemaker(uint64_t seed, std::chrono::microseconds least, std::chrono::microseconds most)
      : thread_([this, seed, least, most] {
          std::mt19937_64 random(seed);
          std::uniform_int_distribution<int64_t> pause(least.count(), most.count());
          const size_t standing = connections();
          while (!stops_) {
            if (random() % 4 != 0) awaitAll(standing);
            std::this_thread::sleep_for(kSlower * std::chrono::microseconds(pause(random)));
            const auto all = SocketBreaker::connections();
            if (all.empty()) continue;
            SocketBreaker::breakOne(all[random() % all.size()], random() % 4 == 0
                                                                    ? SocketBreaker::How::kHangUp
                                                                    : SocketBreaker::How::kReset);
            ++broken_;
          }
        }) {}
  ~Troublemaker() { stop(); }
  void stop() {
    stops_ = true;
    if (thread_.joinable()) thread_.join();
  }
  size_t broken() const { return broken_; }

 private:
  // Factor by which handshakes are slower. Connections that break sooner never carry anything.
#ifdef __SANITIZE_THREAD__
  static constexpr int kSlower = 20;
#else
  static constexpr int kSlower = 1;
#endif
  static size_t connections() { return SocketBreaker::connections().size(); }
  void awaitAll(size_t standing) {
    for (int i = 0; i < 2000 && !stops_ && connections() < standing; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  std::atomic<bool> stops_{false};
  std::atomic<size_t> broken_{0};
  std::thread thread_;
};

}  // namespace mooncake::test
