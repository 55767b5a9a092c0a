#include "engine/transports/tcp/tcp_acceptor.h"

#include <algorithm>
#include <cerrno>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "base/log.h"

namespace mooncake {

TcpAcceptor::TcpAcceptor(const TransportContext& context)
    : context_(context), timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)) {}

Result<std::shared_ptr<TcpAcceptor>> TcpAcceptor::start(const TransportContext& context,
                                                        Fd listener) {
  std::shared_ptr<TcpAcceptor> acceptor(new TcpAcceptor(context));
  if (!acceptor->timer_) return systemError("timerfd_create", errno);
  TcpAcceptor* self = acceptor.get();  // stop() takes the handlers out before it goes
  MOONCAKE_TRY(
      context.loop.add(self->timer_.get(), EPOLLIN, [self](uint32_t) { self->onTimer(); }));
  const auto admit = [](int socket) {
    tune(socket);
    return true;
  };
  auto listening =
      HandshakeListener::start(context, std::move(listener), admit,
                               [weak = acceptor->weak_from_this()](Result<Handshaken> result) {
                                 if (const auto self = weak.lock())
                                   self->onHandshake(std::move(result));
                               });
  if (!listening.ok()) {
    context.loop.remove(self->timer_.get());
    return listening.error();
  }
  acceptor->listener_ = std::move(*listening);
  return acceptor;
}

void TcpAcceptor::stop() {
  std::map<EngineId, std::weak_ptr<TcpChannel>> accepted;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(stopped_, true)) return;
    incomplete_.clear();
    accepted.swap(accepted_);
  }
  // Both wait for their handler, which takes our lock.
  listener_->stop();
  context_.loop.remove(timer_.get());
  for (const auto& [peer, weak] : accepted) {
    if (const auto channel = weak.lock()) channel->close();
  }
}

void TcpAcceptor::onHandshake(Result<Handshaken> result) {
  EngineId peer{};
  uint64_t attempt = 0;
  std::vector<Fd> lanes;
  std::shared_ptr<TcpChannel> channel, standing;
  {
    std::lock_guard lock(mutex_);
    if (stopped_) return;
    if (result.ok()) {
      peer = result->peer;
      attempt = result->attempt;
      lanes = collect(std::move(*result));
      if (const auto found = accepted_.find(peer); found != accepted_.end())
        standing = found->second.lock();
      if (!lanes.empty() && !standing) {
        // Under the same lock: stop() closes every channel that is started.
        channel = TcpChannel::start(context_, peer, std::move(lanes), attempt);
        std::erase_if(accepted_, [](const auto& entry) { return entry.second.expired(); });
        accepted_[peer] = channel;
      }
    }
  }
  if (!result.ok()) {
    // Strangers and scanners are no news; a peer of another job or another life of this one is.
    // Nor is who only asks whether we are there.
    const ErrorCode code = result.error().code;
    log(code == ErrorCode::kRefused    ? LogLevel::kWarning
        : code == ErrorCode::kPeerLost ? LogLevel::kDebug
                                       : LogLevel::kInfo,
        "tcp", "a connection was dropped: ", result.error().message);
  }
  if (channel) {
    context_.onAccepted(peer, std::move(channel));
  } else if (!lanes.empty() && standing->renew(std::move(lanes), attempt)) {
    context_.onRenewed(peer);
  }
}

// All lanes of the channel once this was the last that was missing, else none. Under the lock.
std::vector<Fd> TcpAcceptor::collect(Handshaken lane) {
  const Key key{lane.peer, lane.attempt};
  const auto [found, isNew] =
      incomplete_.try_emplace(key, Incomplete{{}, Deadline::after(context_.env.failureTimeout)});
  auto& lanes = found->second.lanes;
  if (isNew) lanes.resize(lane.lanes);
  // Only a peer that knows the key comes here; one that contradicts itself just gets no channel.
  if (lane.lanes != lanes.size() || lanes[lane.lane]) return {};
  lanes[lane.lane] = std::move(lane.socket);
  if (!std::all_of(lanes.begin(), lanes.end(), [](const Fd& fd) { return bool(fd); })) {
    if (isNew) armTimer();
    return {};
  }
  std::vector<Fd> complete = std::move(lanes);
  incomplete_.erase(found);
  return complete;
}

void TcpAcceptor::onTimer() {
  uint64_t ticks;
  [[maybe_unused]] const auto got = ::read(timer_.get(), &ticks, sizeof(ticks));
  std::lock_guard lock(mutex_);
  std::erase_if(incomplete_, [](const auto& entry) { return entry.second.deadline.passed(); });
  armTimer();
}

void TcpAcceptor::armTimer() {
  if (incomplete_.empty()) return;
  auto first = incomplete_.begin()->second.deadline;
  for (const auto& [key, one] : incomplete_) first = first.earlier(one.deadline);
  const auto left = std::max<std::chrono::nanoseconds>(first.left(), std::chrono::nanoseconds(1));
  const auto seconds = std::chrono::floor<std::chrono::seconds>(left);
  itimerspec when{};
  when.it_value = {.tv_sec = seconds.count(), .tv_nsec = (left - seconds).count()};
  ::timerfd_settime(timer_.get(), 0, &when, nullptr);
}

}  // namespace mooncake
