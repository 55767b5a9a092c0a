#include <algorithm>
#include <chrono>
#include <map>
#include <memory>

#include "base/log.h"
#include "base/mutex.h"
#include "engine/engine.h"
#include "engine/route.h"

namespace mooncake {
namespace {

// Delays before the liveness thread starts: after the first connections, and after all have
// connected to all. The earlier time counts. Until then a death shows as the end of a socket.
constexpr auto kStarting = std::chrono::milliseconds(20);
constexpr auto kStarted = std::chrono::milliseconds(2);

}  // namespace

void Engine::leave(const Farewell& farewell) {
  uint64_t publishedFor;
  Bytes published;
  const bool waits = !loop_->onLoopThread();
  if (waits) {  // until the loop has handled the breaks that have happened by now
    loop_->runAndWait([] {});
    loop_->runAndWait([] {});
  }
  reconnector_->stop(waits ? env().failureTimeout : Clock::duration::zero());
  const bool isFirst = !hasLeft_.exchange(true);
  const auto peers =
      connections_ ? connections_->all() : std::map<EngineId, std::shared_ptr<Peer>>();
  {
    Lock lock(mutex_);
    publishedFor = publishedFor_;
    published = published_;
  }
  // Comes first: a peer that reads our goodbye must not have taken our end for a death before.
  if (liveness_) liveness_->leave();
  if (publishedFor != 0) {
    for (auto& [id, peer] : peers) (void)send(*peer, publishedFor, published);
  }
  if (isFirst && farewell.how != Farewell::How::kDestroyed) {
    const Bytes said = Farewells::encode(farewell);
    for (auto& [id, peer] : peers) (void)send(*peer, Farewells::kTopic, said);
  }
  outbox_->flush();  // the goodbye follows
  for (auto& [id, peer] : peers) peer->channel->flush();
  for (auto& [id, peer] : peers) peer->channel->close();
}

// A socket ends only when the kernel has freed all memory of the process. The mark on its life word
// comes before that. On the loop's thread like every other end, so that ends are reported in order.
void Engine::onExited(const EngineId& id, const std::string& how) {
  loop_->post([this, id, evidence = Evidence{Evidence::Kind::kExited, how}] {
    const auto peer = connections_->find(id);
    if (!peer) return;
    // A suspicion has become certain.
    if (peer->disconnected) return tell({id}, evidence);
    peer->channel->peerExited({ErrorCode::kPeerLost, evidence.detail});
    onEnded(id, evidence);
  });
}

// On the loop's thread.
void Engine::onSilent(const std::vector<Liveness::Silent>& silent) {
  std::vector<EngineId> peers;
  for (const auto& [peer, channel, sign] : silent) {
    if (Liveness::signOf(*channel) == sign) peers.push_back(peer);
  }
  if (peers.empty()) return;
  tell(peers,
       {Evidence::Kind::kSilent, "nothing was heard of it for " +
                                     std::to_string(options_.env.failureTimeout.count()) + " ms"});
}

// On the loop's thread.
void Engine::onBroken(const EngineId& id, const Evidence& evidence) {
  const auto peer = connections_->find(id);
  if (!peer) return onEnded(id, evidence);
  const std::string name = peer->channel->transportName();
  const auto transport =
      std::ranges::find_if(transports_, [&](const auto& one) { return one->name() == name; });
  if (transport == transports_.end()) return onEnded(id, evidence);
  if (peer->disconnected) return;
  const Bytes listens = connections_->endpointOf(id);
  reconnector_->reconnect(id,
                          {.channel = peer->channel,
                           .transport = transport->get(),
                           .endpoint = listens.empty() ? Bytes() : endpointFor(name, listens),
                           .isOurs = peer->isOurs},
                          evidence);
}

// On the loop's thread.
void Engine::onReconnected(const EngineId& id, const std::optional<Evidence>& how) {
  const auto peer = connections_->find(id);
  if (!peer || peer->disconnected) return;
  const std::string name = connections_->nameOf(*peer);
  connections_->countReconnection();
  const auto now = Clock::now();
  const auto took =
      std::chrono::duration_cast<std::chrono::milliseconds>(now - (how ? how->when : now));
  log(LogLevel::kInfo, logName(), "connection to ", name, " broke (",
      how ? how->detail : "at its other end", ") and was made again after ", took.count(), " ms");
  peer->channel->beat();  // so that the other end hears from us
  for (const auto& [topic, message] : lastWords_->repeat(id, now))
    (void)send(*peer, topic, message);
  if (reconnected_) reconnected_(id);
}

void Engine::keepLastWords(const std::vector<std::shared_ptr<Peer>>& to, uint64_t topic,
                           std::vector<Bytes> messages) {
  std::vector<EngineId> ids;
  for (const auto& peer : to) {
    if (peer->channel->isMadeAgain() && !peer->disconnected) ids.push_back(peer->id);
  }
  if (ids.empty()) return;
  lastWords_->keep(std::move(ids), topic, std::move(messages), Clock::now());
}

// On the loop's thread.
void Engine::onEnded(const EngineId& id, const Evidence& seen) {
  const Evidence evidence = farewells_.explain(id, seen);
  // A process that only lost its connection can still be seen to exit.
  if (evidence.kind != Evidence::Kind::kUnreachable) liveness_->unwatch(id);
  const auto peer = connections_->end(id, evidence);
  if (!peer) return;
  // A goodbye is no accusation. The observer logs what follows from an end.
  log(evidence.isGoodbye() || observer_ ? LogLevel::kInfo : LogLevel::kWarning, logName(),
      connections_->nameOf(*peer), " is gone: ", evidence.detail);
  {
    Lock lock(mutex_);
    for (auto& [interrupt, bell] : watchers_) {
      interrupt->bump();
      bell->ring();
    }
  }
  tell({id}, evidence);
}

// On the loop's thread.
void Engine::tell(const std::vector<EngineId>& peers, const Evidence& evidence) {
  if (observer_ && !hasLeft_) observer_(peers, evidence);
}

void Engine::observe(OnEvidence observer, OnReconnected reconnected) {
  loop_->runAndWait(
      [this, observer = std::move(observer), reconnected = std::move(reconnected)]() mutable {
        observer_ = std::move(observer);
        reconnected_ = std::move(reconnected);
        if (!observer_) return;
        const auto peers = connections_->all();
        if (!peers.empty()) watchSoon();
        for (const auto& [id, peer] : peers) {
          if (peer->disconnected) observer_({id}, peer->evidence);
        }
      });
}

// Starts liveness later, for the reason given at startSilenceDetection().
void Engine::watchSoon() {
  loop_->runAt(Deadline::after(kStarting), [this] { beginLiveness(); });
}

// On the loop's thread. connect() has already started the thread. Only an engine that observes and
// never connects starts it here, where no caller can get the error.
void Engine::beginLiveness() {
  const Status begun = liveness_->begin();
  if (!begun.ok())
    log(LogLevel::kError, logName(), "deaths of peers are detected late: ", begun.error().message);
}

// The thread starts a moment later: the peers are just leaving the barrier, and one more thread
// would delay them.
void Engine::startSilenceDetection() {
  liveness_->startSilenceDetection();
  loop_->runAt(Deadline::after(kStarted), [this] { beginLiveness(); });
}

}  // namespace mooncake
