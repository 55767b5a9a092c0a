#include "wires/stream/handshake_listener.h"

#include <cerrno>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "base/descriptors.h"
#include "base/log.h"

namespace mooncake {
namespace {

// How long no connection is accepted after descriptors ran out. Otherwise a waiting connection
// would keep the event loop busy.
constexpr auto kPause = std::chrono::milliseconds(200);
// A descriptor that can be given up for a moment. If no other is left, a connection is accepted and
// dropped, so that its other end does not wait for us in vain.
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
  HandshakeListener* self = started.get();  // stop() removes the handler before this is destroyed
  MOONCAKE_TRY(
      context.loop.add(self->listener_.get(), EPOLLIN, [self](uint32_t) { self->onConnection(); }));
  return started;
}

void HandshakeListener::stop() {
  {
    Lock lock(mutex_);
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
      Lock lock(mutex_);
      ++handshakes_;
    }
    handshakeAccept(std::move(socket), context_, Deadline::after(context_.env.failureTimeout),
                    [weak = weak_from_this()](Result<Handshaken> result) {
                      if (const auto self = weak.lock()) self->onHandshake(std::move(result));
                    });
  }
}

bool HandshakeListener::mayAccept() {
  Lock lock(mutex_);
  if (stopped_) return false;
  if (handshakes_ < kMaxHandshakes) return true;
  (void)context_.loop.modify(listener_.get(), 0);
  return false;
}

// Returns the next waiting connection; empty: there is none.
Fd HandshakeListener::accept() {
  for (;;) {
    Fd accepted(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (accepted) return accepted;
    if (errno == EMFILE || errno == ENFILE) {
      pause(errno);
      return {};
    }
    // Any other error belongs to a connection that died in the queue.
    if (errno != EINTR && errno != ECONNABORTED) return {};
  }
}

// Stops accepting for kPause. accept(2) reports a lack of descriptors even if no connection waits,
// so this first checks with the spare descriptor whether one does.
void HandshakeListener::pause(int failure) {
  if (spare_) {
    spare_.reset();
    Fd dropped(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const bool isNobodyThere = !dropped && (errno == EAGAIN || errno == EWOULDBLOCK);
    dropped.reset();
    spare_ = spareDescriptor();
    if (isNobodyThere && spare_) return;
  }
  if (!std::exchange(hasWarned_, true))
    log(LogLevel::kWarning, "listener",
        "a connection was dropped: ", systemError("accept", failure).message,
        "; further ones are not logged");
  setListening(false);
  context_.loop.runAt(Deadline::after(kPause), [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self) return;
    if (!self->spare_) self->spare_ = spareDescriptor();
    self->isPaused_ = false;
    self->setListening(true);
  });
  isPaused_ = true;
}

// Accepts no connection while paused, or while kMaxHandshakes are under way.
void HandshakeListener::setListening(bool listens) {
  Lock lock(mutex_);
  if (stopped_) return;
  const bool mayListen = !isPaused_ && handshakes_ < kMaxHandshakes;
  (void)context_.loop.modify(listener_.get(), listens && mayListen ? EPOLLIN : 0u);
}

void HandshakeListener::onHandshake(Result<Handshaken> result) {
  bool wasFull;
  {
    Lock lock(mutex_);
    wasFull = handshakes_-- == kMaxHandshakes;
  }
  if (wasFull) setListening(true);
  done_(std::move(result));
}

}  // namespace mooncake
