#pragma once

#include <cstdint>
#include <utility>

namespace mooncake {

// Owns a file descriptor. Forked children do not inherit it (base/fork.h), and their copy of this
// object closes nothing.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) { own(fd); }
  Fd(Fd&& other) noexcept { take(other); }
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      take(other);
    }
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  void own(int fd);
  void take(Fd& other) {
    fd_ = std::exchange(other.fd_, -1);
    forkGeneration_ = other.forkGeneration_;
  }

  int fd_ = -1;
  uint32_t forkGeneration_ = 0;  // forkGeneration() when the descriptor was taken over
};

}  // namespace mooncake
