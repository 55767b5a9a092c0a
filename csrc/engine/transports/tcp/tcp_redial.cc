#include "engine/transports/tcp/tcp_redial.h"

#include <algorithm>
#include <sys/epoll.h>

namespace mooncake {

void TcpRedial::begin(std::unique_ptr<TcpCall> call, std::shared_ptr<TcpChannel> channel,
                      Deadline deadline, Done done) {
  const auto one = std::make_shared<One>();
  one->call = std::move(call);
  one->channel = std::move(channel);
  one->done = std::move(done);
  {
    std::lock_guard lock(mutex_);
    if (isShutDown_) return;
    calls_.push_back(one);
  }
  // The call itself knows its deadline; somebody must ask it.
  one->timer = loop_.runAt(deadline, [self = shared_from_this(), one] { self->goOn(one); });
  // Not from here: whoever tells of a connection's end is not through with it yet.
  loop_.post([self = shared_from_this(), one] { self->goOn(one); });
}

void TcpRedial::shutdown() {
  std::vector<std::shared_ptr<One>> calls;
  std::vector<int> sockets;
  {
    std::lock_guard lock(mutex_);
    isShutDown_ = true;
    calls.swap(calls_);
    for (const auto& one : calls)
      sockets.insert(sockets.end(), one->sockets.begin(), one->sockets.end());
  }
  // Their timers find that they have ended. Waits for the handlers, which take the lock.
  for (const int socket : sockets) loop_.remove(socket);
}

void TcpRedial::goOn(const std::shared_ptr<One>& one) {
  {
    std::lock_guard lock(mutex_);
    if (isShutDown_ || std::find(calls_.begin(), calls_.end(), one) == calls_.end()) return;
    unlisten(*one);
  }
  const auto all = one->call->shake();
  if (!all.ok()) return end(one, all.status());
  if (!*all) return listen(one);
  const bool taken = one->channel->renew(one->call->take(), one->call->attempt());
  end(one, taken ? Status() : Status(ErrorCode::kAborted, "the channel is closed"));
}

void TcpRedial::listen(const std::shared_ptr<One>& one) {
  std::vector<pollfd> sockets;
  one->call->addSockets(sockets);
  Status added;
  {
    std::lock_guard lock(mutex_);
    if (isShutDown_) return;
    for (const pollfd& socket : sockets) {
      if (!added.ok()) break;
      added = loop_.add(socket.fd, socket.events == POLLOUT ? EPOLLOUT : EPOLLIN,
                        [self = shared_from_this(), one](uint32_t) { self->goOn(one); });
      if (added.ok()) one->sockets.push_back(socket.fd);
    }
  }
  if (!added.ok()) end(one, added);
}

// Under the lock, on the loop's thread.
void TcpRedial::unlisten(One& one) {
  for (const int socket : one.sockets) loop_.remove(socket);
  one.sockets.clear();
}

void TcpRedial::end(const std::shared_ptr<One>& one, Status how) {
  {
    std::lock_guard lock(mutex_);
    if (isShutDown_ || std::erase(calls_, one) == 0) return;
    unlisten(*one);
  }
  loop_.cancel(one->timer);
  one->call.reset();
  one->done(std::move(how));
}

}  // namespace mooncake
