#include <chrono>

#include "base/log.h"
#include "engine/engine.h"
#include "engine/route.h"

namespace mooncake {
namespace {

// Wire form:  u8 version  u8 how  string why
constexpr uint64_t kFarewellTopic = 2;
constexpr uint8_t kFarewellVersion = 1;
constexpr size_t kMostFarewellText = 512;

// Delays before the liveness thread starts: after the first connections, and after all have
// connected to all. The earlier time counts. Until then a death shows as the end of a socket.
constexpr auto kStarting = std::chrono::milliseconds(20);
constexpr auto kStarted = std::chrono::milliseconds(2);

}  // namespace

void Engine::leave(const Farewell& farewell) {
  std::map<EngineId, std::shared_ptr<Peer>> peers;
  uint64_t publishedFor;
  Bytes published;
  const bool waits = !loop_->onLoopThread();
  if (waits) {  // until the loop has handled the breaks that have happened by now
    runOnLoop([] {});
    runOnLoop([] {});
  }
  reconnector_->stop(waits ? env().failureTimeout : Clock::duration::zero());
  const bool isFirst = !hasLeft_.exchange(true);
  {
    std::lock_guard lock(mutex_);
    peers = peers_;
    publishedFor = publishedFor_;
    published = published_;
  }
  // Comes first: a peer that reads our goodbye must not have taken our end for a death before.
  if (liveness_) liveness_->leave();
  if (publishedFor != 0) {
    for (auto& [id, peer] : peers) (void)send(*peer, publishedFor, published);
  }
  if (isFirst && farewell.how != Farewell::How::kDestroyed) {
    const Bytes said = ByteWriter()
                           .put(kFarewellVersion)
                           .put(static_cast<uint8_t>(farewell.how))
                           .putString(std::string_view(farewell.why).substr(0, kMostFarewellText))
                           .take();
    for (auto& [id, peer] : peers) (void)send(*peer, kFarewellTopic, said);
  }
  outbox_->flush();  // the goodbye follows
  for (auto& [id, peer] : peers) peer->channel->flush();
  for (auto& [id, peer] : peers) peer->channel->close();
}

void Engine::hearFarewells() {
  openTopic(kFarewellTopic,
            [this](const EngineId& from, ByteView message) { onFarewell(from, message); });
}

// On the loop's thread.
void Engine::onFarewell(const EngineId& from, ByteView message) {
  ByteReader in(message);
  const auto version = in.get<uint8_t>();
  const auto how = in.get<uint8_t>();
  std::string why = in.getString(kMostFarewellText);
  const bool isKnown = how == static_cast<uint8_t>(Farewell::How::kEnded) ||
                       how == static_cast<uint8_t>(Farewell::How::kFailed);
  if (!in.finish("farewell").ok() || version != kFarewellVersion || !isKnown) {
    log(LogLevel::kWarning, logName(), "a farewell that does not decode is dropped");
    return;
  }
  farewells_[from] = {static_cast<Farewell::How>(how), std::move(why)};
}

// Replaces a goodbye with the farewell that its sender gave, if any.
Evidence Engine::withFarewell(const EngineId& id, const Evidence& evidence) const {
  const auto said = farewells_.find(id);
  if (!evidence.isGoodbye() || said == farewells_.end()) return evidence;
  const auto& [how, why] = said->second;
  if (how == Farewell::How::kFailed) return {Evidence::Kind::kFailed, why, evidence.when};
  return {Evidence::Kind::kEnded,
          why.empty() ? "its program ended without destroy_process_group()" : why, evidence.when};
}

// A socket ends only when the kernel has freed all memory of the process. The mark on its life word
// comes before that. On the loop's thread like every other end, so that ends are reported in order.
void Engine::onExited(const EngineId& id, const std::string& how) {
  loop_->post([this, id, evidence = Evidence{Evidence::Kind::kExited, how}] {
    std::shared_ptr<Peer> peer;
    {
      std::lock_guard lock(mutex_);
      peer = known(id);
    }
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
  std::shared_ptr<Peer> peer;
  Transport* transport = nullptr;
  Bytes endpoint;
  {
    std::lock_guard lock(mutex_);
    peer = known(id);
    if (peer) {
      const std::string name = peer->channel->transportName();
      for (const auto& one : transports_) {
        if (one->name() == name) transport = one.get();
      }
      if (const auto listens = endpoints_.find(id); listens != endpoints_.end())
        endpoint = endpointFor(name, listens->second);
    }
  }
  if (!transport) return onEnded(id, evidence);
  if (peer->disconnected) return;
  reconnector_->reconnect(id,
                          {.channel = peer->channel,
                           .transport = transport,
                           .endpoint = std::move(endpoint),
                           .isOurs = peer->isOurs},
                          evidence);
}

// On the loop's thread.
void Engine::onReconnected(const EngineId& id, const std::optional<Evidence>& how) {
  std::shared_ptr<Peer> peer;
  std::string name;
  {
    std::lock_guard lock(mutex_);
    peer = known(id);
    if (!peer || peer->disconnected) return;
    name = peer->name.empty() ? "a peer" : peer->name;
    ++counters_.retries;
  }
  const auto now = Clock::now();
  const auto took =
      std::chrono::duration_cast<std::chrono::milliseconds>(now - (how ? how->when : now));
  log(LogLevel::kInfo, logName(), "connection to ", name, " broke (",
      how ? how->detail : "at its other end", ") and was made again after ", took.count(), " ms");
  peer->channel->beat();  // so that the other end hears from us
  if (reconnected_) reconnected_(id);
}

// On the loop's thread.
void Engine::onEnded(const EngineId& id, const Evidence& seen) {
  const Evidence evidence = withFarewell(id, seen);
  // A process that only lost its connection can still be seen to exit.
  if (evidence.kind != Evidence::Kind::kUnreachable) liveness_->unwatch(id);
  {
    std::lock_guard lock(mutex_);
    const auto found = peers_.find(id);
    if (found == peers_.end()) {
      endedEarly_[id] = evidence;
      return;
    }
    if (found->second->disconnected) return;
    found->second->evidence = evidence;
    found->second->disconnected = true;
    endpoints_.erase(id);
    const std::string& name = found->second->name;
    // A goodbye is no accusation. The observer logs what follows from an end.
    log(evidence.isGoodbye() || observer_ ? LogLevel::kInfo : LogLevel::kWarning, logName(),
        name.empty() ? "a peer" : name, " is gone: ", evidence.detail);
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
  runOnLoop([this, observer = std::move(observer), reconnected = std::move(reconnected)]() mutable {
    observer_ = std::move(observer);
    reconnected_ = std::move(reconnected);
    if (!observer_) return;
    std::vector<std::shared_ptr<Peer>> disconnected;
    {
      std::lock_guard lock(mutex_);
      if (!peers_.empty()) watchSoon();
      for (const auto& [id, peer] : peers_) {
        if (peer->disconnected) disconnected.push_back(peer);
      }
    }
    for (const auto& peer : disconnected) observer_({peer->id}, peer->evidence);
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
