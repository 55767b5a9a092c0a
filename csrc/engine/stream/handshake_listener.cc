#include "engine/stream/handshake_listener.h"

#include <cerrno>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

namespace mooncake {
namespace {

// A descriptor that may be given up for a moment: when no other is left, a connection is taken and
// dropped, because an unaccepted one would keep the event loop busy for ever.
Fd spareDescriptor() { return Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

}  // namespace

HandshakeListener::HandshakeListener(const TransportContext& context, Fd listener, Admit admit,
                                     Done done)
    : context_(context),
      listener_(std::move(listener)),
      spare_(spareDescriptor()),
      admit_(std::move(admit)),
      done_(std::move(done)) {}

Result<std::shared_ptr<HandshakeListener>> HandshakeListener::start(const TransportContext& context,
                                                                    Fd listener, Admit admit,
                                                                    Done done) {
  std::shared_ptr<HandshakeListener> started(
      new HandshakeListener(context, std::move(listener), std::move(admit), std::move(done)));
  HandshakeListener* self = started.get();  // stop() takes the handler out before it goes
  MOONCAKE_TRY(
      context.loop.add(self->listener_.get(), EPOLLIN, [self](uint32_t) { self->onConnection(); }));
  return started;
}

void HandshakeListener::stop() {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(stopped_, true)) return;
  }
  context_.loop.remove(listener_.get());  // waits for the handler, which takes our lock
  listener_.reset();
}

void HandshakeListener::onConnection() {
  while (mayAccept()) {
    Fd socket = accept();
    if (!socket) return;
    if (!admit_(socket.get())) continue;
    {
      std::lock_guard lock(mutex_);
      ++handshakes_;
    }
    handshakeAccept(std::move(socket), context_, Deadline::after(context_.env.failureTimeout),
                    [weak = weak_from_this()](Result<Handshaken> result) {
                      if (const auto self = weak.lock()) self->onHandshake(std::move(result));
                    });
  }
}

bool HandshakeListener::mayAccept() {
  std::lock_guard lock(mutex_);
  if (stopped_) return false;
  if (handshakes_ < kMaxHandshakes) return true;
  (void)context_.loop.modify(listener_.get(), 0);
  return false;
}

// The next connection that waits; empty when none does.
Fd HandshakeListener::accept() {
  for (;;) {
    Fd accepted(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (accepted) return accepted;
    if (errno == EMFILE || errno == ENFILE) {
      spare_.reset();
      Fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)).reset();
      spare_ = spareDescriptor();
      return {};
    }
    // The other errors are those of a connection that died while it waited in line.
    if (errno != EINTR && errno != ECONNABORTED) return {};
  }
}

void HandshakeListener::onHandshake(Result<Handshaken> result) {
  {
    std::lock_guard lock(mutex_);
    const bool wasFull = handshakes_-- == kMaxHandshakes;
    if (wasFull && !stopped_) (void)context_.loop.modify(listener_.get(), EPOLLIN);
  }
  done_(std::move(result));
}

}  // namespace mooncake
