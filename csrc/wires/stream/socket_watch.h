#pragma once

#include <sys/epoll.h>
#include <utility>

#include "base/event_loop.h"

namespace mooncake {

// The events of a socket for which a loop wakes. The owner's lock guards it.
class SocketWatch {
 public:
  explicit SocketWatch(EventLoop& loop) : loop_(loop) {}

  // Wakes for bytes of the peer, and not for room.
  Status begin(int socket, EventLoop::Handler handler) {
    socket_ = socket;
    forBytes_ = true;
    forRoom_ = false;
    return loop_.add(socket, EPOLLIN, std::move(handler));
  }
  void watchForRoom(bool watches) { set(forRoom_, watches); }
  void watchForBytes(bool watches) { set(forBytes_, watches); }
  bool isForRoom() const { return forRoom_; }

 private:
  void set(bool& field, bool value) {
    if (field == value) return;
    field = value;
    const Status done =
        loop_.modify(socket_, (forBytes_ ? EPOLLIN : 0u) | (forRoom_ ? EPOLLOUT : 0u));
    if (!done.ok()) field = !value;  // the socket has left the loop
  }

  EventLoop& loop_;
  int socket_ = -1;
  bool forBytes_ = true;
  bool forRoom_ = false;
};

}  // namespace mooncake
