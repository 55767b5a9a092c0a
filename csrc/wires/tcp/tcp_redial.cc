#include "wires/tcp/tcp_redial.h"

#include <algorithm>
#include <sys/epoll.h>
#include <utility>

namespace mooncake {

void TcpRedial::begin(std::unique_ptr<TcpCall> call, Deadline deadline, Use use, Done done) {
  const auto one = std::make_shared<One>();
  one->call = std::move(call);
  one->use = std::move(use);
  one->done = std::move(done);
  {
    Lock lock(mutex_);
    if (isShutDown_) return;
    calls_.push_back(one);
  }
  // The call knows its deadline itself, but shake() must be called for it to fail.
  one->timer = loop_.runAt(deadline, [self = shared_from_this(), one] { self->goOn(one); });
  // Not called directly: the caller may be in the middle of reporting the end of a connection.
  loop_.post([self = shared_from_this(), one] { self->goOn(one); });
}

void TcpRedial::shutdown() {
  std::vector<std::shared_ptr<One>> calls;
  std::vector<int> sockets;
  {
    Lock lock(mutex_);
    isShutDown_ = true;
    calls.swap(calls_);
    for (const auto& one : calls) sockets.push_back(one->socket);
  }
  // Their timers find that they have ended. remove() waits for the handlers, which take the lock.
  for (const int socket : sockets) loop_.remove(socket);
}

void TcpRedial::goOn(const std::shared_ptr<One>& one) {
  {
    Lock lock(mutex_);
    if (isShutDown_ || std::find(calls_.begin(), calls_.end(), one) == calls_.end()) return;
    unlisten(*one);
  }
  const auto shaken = one->call->shake();
  if (!shaken.ok()) return end(one, shaken.status());
  if (!*shaken) return listen(one);
  end(one, one->use(*one->call));
}

void TcpRedial::listen(const std::shared_ptr<One>& one) {
  const pollfd awaited = one->call->awaited();
  Status added;
  {
    Lock lock(mutex_);
    if (isShutDown_) return;
    added = loop_.add(awaited.fd, awaited.events == POLLOUT ? EPOLLOUT : EPOLLIN,
                      [self = shared_from_this(), one](uint32_t) { self->goOn(one); });
    if (added.ok()) one->socket = awaited.fd;
  }
  if (!added.ok()) end(one, added);
}

// On the loop's thread.
void TcpRedial::unlisten(One& one) {
  if (one.socket >= 0) loop_.remove(std::exchange(one.socket, -1));
}

void TcpRedial::end(const std::shared_ptr<One>& one, Status how) {
  {
    Lock lock(mutex_);
    if (isShutDown_ || std::erase(calls_, one) == 0) return;
    unlisten(*one);
  }
  loop_.cancel(one->timer);
  one->call.reset();
  one->done(std::move(how));
}

}  // namespace mooncake
