#include "wires/stream/linger.h"

#include <array>
#include <cerrno>
#include <memory>
#include <sys/epoll.h>
#include <sys/socket.h>

namespace mooncake {
namespace {

constexpr auto kLingering = std::chrono::seconds(1);

// Reads and drops everything. False: no more bytes can come.
bool discard(int socket) {
  std::array<std::byte, 16384> nowhere;
  for (;;) {
    const ssize_t got = ::recv(socket, nowhere.data(), nowhere.size(), MSG_DONTWAIT);
    if (got <= 0) return got < 0 && (errno == EAGAIN || errno == EINTR);
  }
}

}  // namespace

void linger(EventLoop& loop, Fd closing) {
  const int socket = closing.get();
  if (!discard(socket)) return;
  const auto shared = std::make_shared<Fd>(std::move(closing));
  // The handler owns the socket; removing it closes the socket.
  (void)loop.add(socket, EPOLLIN, [&loop, shared](uint32_t) {
    if (!discard(shared->get())) loop.remove(shared->get());
  });
  loop.runAt(Deadline::after(kLingering), [&loop, weak = std::weak_ptr(shared)] {
    if (const auto still = weak.lock()) loop.remove(still->get());
  });
}

}  // namespace mooncake
