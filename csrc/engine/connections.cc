#include "engine/connections.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <poll.h>

#include "base/backoff.h"
#include "engine/route.h"

namespace mooncake {
namespace {

// How long an admitted peer's channel is waited for.
constexpr auto kAdmitted = std::chrono::seconds(1);
// Bounds of the pause before the next call, after a call crossed the peer's own call or the end of
// the last channel. The pause doubles, with jitter.
constexpr auto kLeastPause = std::chrono::microseconds(500);
constexpr auto kMostPause = std::chrono::milliseconds(50);

}  // namespace

// Registers a new channel's peer.
std::shared_ptr<Peer> Connections::remember(const EngineId& id, std::shared_ptr<Channel> channel,
                                            bool isOurs) {
  auto peer = std::make_shared<Peer>();
  peer->id = id;
  peer->isOurs = isOurs;
  ++counters_.opened;
  peer->channel = std::move(channel);
  peer->process = PeerProcess(peer->channel->peerLife().process);
  const auto early = endedEarly_.extract(id);
  const bool isBroken = early && early.mapped().kind == Evidence::Kind::kUnreachable;
  if (early && !isBroken) {
    peer->evidence = early.mapped();
    peer->disconnected = true;
  } else {
    liveness_.watch(id, peer->channel);
  }
  if (const auto last = known(id); last && last->hasLateWrites()) lateWriters_.push_back(last);
  peers_[id] = peer;
  if (isBroken) loop_.post([this, id, how = early.mapped()] { options_.onBroken(id, how); });
  return peer;
}

// find(), for callers that hold the lock.
std::shared_ptr<Peer> Connections::known(const EngineId& id) const {
  const auto found = peers_.find(id);
  return found == peers_.end() ? nullptr : found->second;
}

// Called when a call or a wait for the peer has ended. Keeps the endpoint of a
// connected peer and drops any other: nothing calls such a peer again on its own.
void Connections::keepEndpoint(const EngineId& id, ByteView endpoint) {
  const auto peer = known(id);
  if (peer && !peer->disconnected) {
    endpoints_[id] = Bytes(endpoint.begin(), endpoint.end());
  } else {
    endpoints_.erase(id);
    if (peer) peer->lastEndpoint.assign(endpoint.begin(), endpoint.end());
  }
}

void Connections::dropEndpoint(Peer& peer) {
  const auto known = endpoints_.extract(peer.id);
  if (known) peer.lastEndpoint = std::move(known.mapped());
}

// Returns whether an admitted peer's channel is still expected.
bool Connections::isComing(const EngineId& id) const {
  const auto found = admitted_.find(id);
  return found != admitted_.end() && Clock::now() < found->second;
}

// On the loop's thread. If two calls cross, the call of the smaller id wins. So the engine with the
// smaller id does not admit the other one while it calls itself. An admitted peer is waited for
// before it is called.
bool Connections::admits(const EngineId& id) {
  Lock lock(mutex_);
  const auto peer = known(id);
  if (peer && peer->isBeingForgotten) return false;  // it calls again, and gets a new Peer
  // The peer is making its connection again, or its goodbye is still on its way.
  if (peer && !peer->disconnected) return !peer->isOurs && peer->channel->isMadeAgain();
  if (calling_.contains(id) && options_.id < id) return false;
  const auto now = Clock::now();
  std::erase_if(admitted_, [&](const auto& entry) { return entry.second <= now; });
  admitted_[id] = now + kAdmitted;
  return true;
}

Result<std::shared_ptr<Peer>> Connections::open(ByteView endpoint, std::string name,
                                                Deadline deadline, const StopSignal* stop) {
  const auto owner = endpointOwner(endpoint);
  if (!owner.ok()) return owner.error();
  const EngineId id = *owner;
  if (id == options_.id) return std::shared_ptr<Peer>();
  Clock::duration pause = kLeastPause;
  for (bool isFirst = true;; isFirst = false) {
    {
      Lock lock(mutex_);
      for (;;) {
        const auto peer = known(id);
        if (peer && !peer->disconnected && !peer->isBeingForgotten) {
          if (peer->name.empty()) peer->name = name;
          counters_.reused += isFirst;
          keepEndpoint(id, endpoint);
          return peer;
        }
        // Another thread calls the peer, or the peer has called us.
        if (!calling_.contains(id) && !isComing(id)) break;
        const auto coming = admitted_.find(id);
        const auto until =
            coming == admitted_.end() ? deadline.when() : std::min(deadline.when(), coming->second);
        arrived_.wait_until(mutex_, until);
        if (deadline.passed())
          return Error{ErrorCode::kTimeout,
                       "cannot connect to " + name + ": it did not connect in time"};
      }
      calling_.insert(id);
      counters_.retries += !isFirst;
    }
    auto channel = call(id, endpoint, deadline, stop);
    Lock lock(mutex_);
    calling_.erase(id);
    arrived_.notify_all();
    if (channel.ok()) {
      const auto peer = remember(id, std::move(*channel), true);
      peer->name = name;
      keepEndpoint(id, endpoint);
      return peer;
    }
    keepEndpoint(id, endpoint);
    if (channel.error().code != ErrorCode::kInterrupted || deadline.passed()) {
      return Error{channel.error().code,
                   "cannot connect to " + name + ": " + channel.error().message};
    }
    // The peer's own call is coming, or the peer is about to see that the last channel has ended.
    const auto there = [&]() REQUIRES(mutex_) {
      const auto peer = known(id);
      return (peer && !peer->disconnected) || isComing(id);
    };
    arrived_.wait_until(mutex_, std::min(deadline.when(), Clock::now() + jittered(pause)), there);
    pause = doubled(pause, kMostPause);
  }
}

Result<std::shared_ptr<Channel>> Connections::call(const EngineId& id, ByteView endpoint,
                                                   Deadline deadline, const StopSignal* stop) {
  auto connecting = openRoute(transports_, id, endpoint, deadline);
  if (!connecting.ok()) return connecting.error();
  for (std::vector<pollfd> sockets;; sockets.clear()) {
    auto channel = (*connecting)->advance();
    if (!channel.ok() || *channel) return channel;
    if (stop && stop->isStopped()) return Error{ErrorCode::kAborted, "the engine is closed"};
    (*connecting)->addSockets(sockets);
    if (stop) sockets.push_back({.fd = stop->descriptor(), .events = POLLIN, .revents = 0});
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.left()).count();
    if (::poll(sockets.data(), sockets.size(), int(std::clamp<int64_t>(left, 0, 1000))) < 0 &&
        errno != EINTR)
      return systemError("poll", errno);
  }
}

void Connections::forgetUnderLock(const std::shared_ptr<Peer>& peer) {
  if (peer->hasLateWrites()) lateWriters_.push_back(peer);
  peers_.erase(peer->id);
  dropEndpoint(*peer);
}

std::vector<std::shared_ptr<Peer>> Connections::lateWriters() {
  Lock lock(mutex_);
  std::erase_if(lateWriters_, [](const auto& peer) { return !peer->hasLateWrites(); });
  auto all = lateWriters_;
  for (const auto& [id, peer] : peers_) {
    if (peer->hasLateWrites()) all.push_back(peer);
  }
  return all;
}

Status Connections::forget(const std::shared_ptr<Peer>& peer, Deadline deadline) {
  const EngineId id = peer->id;
  {
    Lock lock(mutex_);
    if (!arrived_.wait_until(mutex_, deadline.when(),
                             [&]() REQUIRES(mutex_) { return !calling_.contains(id); }))
      return {ErrorCode::kTimeout, "cannot forget " + peer->name + ": it is being called"};
    if (known(id) != peer) return {};  // it has been forgotten, or has a new Peer
    calling_.insert(id);
    peer->isBeingForgotten = true;
  }
  peer->channel->close();
  liveness_.unwatch(id);
  // Runs after the loop has handled all earlier evidence about the peer.
  loop_.runAndWait([this, id] { options_.onDropped(id); });
  Lock lock(mutex_);
  if (!peer->disconnected) {
    peer->evidence = {Evidence::Kind::kGoodbye, "it was forgotten here"};
    peer->disconnected = true;
  }
  forgetUnderLock(peer);
  endedEarly_.erase(id);
  calling_.erase(id);
  arrived_.notify_all();
  return {};
}

// Ends idle connections and drops peers that are long gone. On the loop's thread, periodically.
void Connections::collect() {
  const auto now = Clock::now();
  std::vector<std::shared_ptr<Peer>> standing, gone;
  {
    Lock lock(mutex_);
    for (const auto& [id, peer] : peers_) {
      if (!peer->disconnected) {
        standing.push_back(peer);
      } else if (peer->evidence.when + options_.idleAfter < now && !calling_.contains(id)) {
        gone.push_back(peer);
      }
    }
    for (const auto& peer : gone) forgetUnderLock(peer);
    std::erase_if(endedEarly_, [&](const auto& ended) REQUIRES(mutex_) {
      return ended.second.when + options_.idleAfter < now && !calling_.contains(ended.first);
    });
    counters_.collected += gone.size();
  }
  for (const auto& peer : gone) {
    liveness_.unwatch(peer->id);
    options_.onDropped(peer->id);
  }
  size_t rested = 0;
  for (const auto& peer : standing) rested += peer->channel->restConnections();
  {
    Lock lock(mutex_);
    counters_.collected += rested;
  }
  loop_.runAt(Deadline::after(options_.idleAfter / 2), [this] { collect(); });
}

void Connections::startCollecting() {
  loop_.post([this] { collect(); });
}

void Connections::onAccepted(const EngineId& id, std::shared_ptr<Channel> channel) {
  Lock lock(mutex_);
  remember(id, std::move(channel), false);
  admitted_.erase(id);
  lastArrival_ = Clock::now();
  arrived_.notify_all();
}

std::shared_ptr<Peer> Connections::find(const EngineId& id) const {
  Lock lock(mutex_);
  return known(id);
}

std::map<EngineId, std::shared_ptr<Peer>> Connections::all() const {
  Lock lock(mutex_);
  return peers_;
}

Bytes Connections::endpointOf(const EngineId& id) const {
  Lock lock(mutex_);
  const auto found = endpoints_.find(id);
  return found == endpoints_.end() ? Bytes() : found->second;
}

Bytes Connections::endpointOf(const Peer& peer) const {
  Lock lock(mutex_);
  const auto found = endpoints_.find(peer.id);
  return found == endpoints_.end() ? peer.lastEndpoint : found->second;
}

void Connections::noteEndpoint(const EngineId& id, ByteView endpoint, const std::string& name) {
  Lock lock(mutex_);
  const auto peer = known(id);
  if (!peer) return;
  if (peer->name.empty()) peer->name = name;
  keepEndpoint(id, endpoint);
}

std::shared_ptr<Peer> Connections::end(const EngineId& id, const Evidence& evidence) {
  Lock lock(mutex_);
  const auto peer = known(id);
  if (!peer) {
    endedEarly_[id] = evidence;
    return nullptr;
  }
  if (peer->disconnected) return nullptr;
  peer->evidence = evidence;
  peer->disconnected = true;
  dropEndpoint(*peer);
  return peer;
}

void Connections::countReconnection() {
  Lock lock(mutex_);
  ++counters_.retries;
}

std::string Connections::nameOf(const Peer& peer) const {
  Lock lock(mutex_);
  return peer.name.empty() ? "a peer" : peer.name;
}

// The peers end without the lock, which end() takes.
void Connections::clear() {
  std::map<EngineId, std::shared_ptr<Peer>> peers;
  Lock lock(mutex_);
  peers.swap(peers_);
}

Connections::Counters Connections::counters() const {
  Lock lock(mutex_);
  Counters now = counters_;
  for (const auto& [id, peer] : peers_) {
    if (peer->disconnected) continue;
    ++now.active;
    now.connections += peer->channel->connections();
  }
  now.pending = calling_.size();
  now.addresses = endpoints_.size();
  return now;
}

}  // namespace mooncake
