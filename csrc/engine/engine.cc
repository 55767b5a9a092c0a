#include "engine/engine.h"

#include <algorithm>
#include <cerrno>
#include <sys/random.h>
#include <sys/resource.h>

#include "base/descriptors.h"
#include "base/log.h"
#include "engine/contract/registry.h"
#include "engine/route.h"

namespace mooncake {
namespace {

// Pause before a peer that was being called is forgotten.
constexpr auto kForgetAgain = std::chrono::milliseconds(100);
// How long last words are kept, as a multiple of the failure timeout. Two suffice if both ends are
// punctual.
constexpr int kLastWordsKept = 4;

// Returns the transports to use, best first: all built-in ones, or the transports that the
// environment names, in that order.
Result<std::vector<const TransportEntry*>> chooseTransports(const EngineEnv& env) {
  std::vector<const TransportEntry*> chosen;
  const auto& registry = transportRegistry();
  if (env.transports.empty()) {
    for (const auto& entry : registry) {
      if (!entry.isOnlyByName) chosen.push_back(&entry);
    }
    return chosen;
  }
  for (const auto& name : env.transports) {
    const auto found =
        std::find_if(registry.begin(), registry.end(),
                     [&](const TransportEntry& entry) { return name == entry.name; });
    if (found == registry.end()) {
      std::string known;
      for (const auto& entry : registry)
        known += std::string(known.empty() ? "" : ", ") + entry.name;
      return Error{ErrorCode::kUnsupported,
                   "transport '" + name + "' was asked for, but this build has only: " + known};
    }
    chosen.push_back(&*found);
  }
  return chosen;
}

}  // namespace

// A limited process maps an arena for each rank of the host, so each arena takes a small share.
size_t usualArenaBytes() {
  constexpr rlim_t kMost = rlim_t(64) << 30, kLeast = rlim_t(4) << 30, kShares = 64;
  rlimit space{.rlim_cur = RLIM_INFINITY, .rlim_max = RLIM_INFINITY}, file = space;
  ::getrlimit(RLIMIT_AS, &space);
  ::getrlimit(RLIMIT_FSIZE, &file);
  const bool isLimited = space.rlim_cur != RLIM_INFINITY;
  const rlim_t bytes = isLimited ? std::clamp(space.rlim_cur / kShares, kLeast, kMost) : kMost;
  return std::min(bytes, file.rlim_cur);
}

Bytes publicKey() {
  constexpr std::string_view kText = "mooncake: no key, open to whoever reaches it";
  const auto bytes = std::as_bytes(std::span(kText));
  return Bytes(bytes.begin(), bytes.end());
}

Result<std::shared_ptr<Engine>> Engine::create(EngineOptions options) {
  if (options.jobKey.size() < kLeastJobKeyBytes) {
    return Error{ErrorCode::kInvalidArgument,
                 "an engine needs the job's key, " + std::to_string(kLeastJobKeyBytes) +
                     " bytes or more, not " + std::to_string(options.jobKey.size()) +
                     ": set MOONCAKE_JOB_KEY or hand one out"};
  }
  if (options.jobKey == publicKey()) {
    log(LogLevel::kWarning, options.logName,
        "this engine has no key: whoever reaches its port can read and write the memory that is "
        "registered here");
  }
  raiseDescriptorLimit();
  auto crypto = Crypto::load();
  if (!crypto.ok()) return crypto.error();
  auto chosen = chooseTransports(options.env);
  if (!chosen.ok()) return chosen.error();
  if (options.env.arenaBytes != 0) options.arenaBytes = options.env.arenaBytes;
  if (options.arenaBytes == 0) options.arenaBytes = usualArenaBytes();
  auto arena = Arena::create(options.arenaBytes);
  if (!arena.ok()) return arena.error();
  auto loop = EventLoop::start("mooncake-io");
  if (!loop.ok()) return loop.error();

  std::shared_ptr<Engine> engine(new Engine);
  engine->options_ = std::move(options);
  engine->arena_ = std::move(*arena);
  auto leases = LeaseTable::create(*engine->arena_);
  if (!leases.ok()) return leases.error();
  engine->leases_ = std::move(*leases);
  engine->loop_ = std::move(*loop);
  engine->messagePools_ =
      std::make_unique<MessagePools>(*engine->loop_, engine->options_.env.peerMessages);
  std::vector<EventLoop*> dataLoops;
  for (size_t i = 0; i < engine->options_.dataThreads; ++i) {
    auto data = EventLoop::start("mooncake-data");
    if (!data.ok()) return data.error();
    dataLoops.push_back(data->get());
    engine->dataLoops_.push_back(std::move(*data));
  }
  engine->topics_ = std::make_unique<MessageRouter>(*engine->loop_);
  engine->outbox_.reset(new Outbox(*engine->loop_, engine->logName()));
  engine->lastWords_ =
      std::make_unique<LastWords>(kLastWordsKept * engine->options_.env.failureTimeout);
  Engine* self = engine.get();
  engine->reconnector_.reset(new Reconnector(
      *engine->loop_,
      {.failureTimeout = engine->options_.env.failureTimeout,
       .onLost = [self](const EngineId& peer,
                        const Evidence& evidence) { self->onEnded(peer, evidence); },
       .onReconnected =
           [self](const EngineId& peer, const std::optional<Evidence>& how) {
             self->onReconnected(peer, how);
           }}));
  EngineId id;
  if (::getrandom(id.data(), id.size(), 0) != ssize_t(id.size()))
    return systemError("getrandom", errno);
  auto liveness = Liveness::create(
      *engine->arena_, {.failureTimeout = engine->options_.env.failureTimeout,
                        .onExited = [self](const EngineId& peer,
                                           const std::string& how) { self->onExited(peer, how); },
                        .onSilent =
                            [self](std::vector<Liveness::Silent> silent) {
                              // First reads everything that has arrived: the slow part may be our
                              // own loop.
                              self->loop_->post([self, silent = std::move(silent)] {
                                self->loop_->post([self, silent] { self->onSilent(silent); });
                              });
                            }});
  if (!liveness.ok()) return liveness.error();
  engine->liveness_ = std::move(*liveness);
  engine->connections_ = std::make_unique<Connections>(
      *engine->loop_, *engine->liveness_, engine->transports_,
      Connections::Options{
          .id = id,
          .logName = engine->logName(),
          .idleAfter = engine->options_.idleAfter,
          .onBroken = [self](const EngineId& peer,
                             const Evidence& how) { self->onBroken(peer, how); },
          .onDropped =
              [self](const EngineId& peer) {
                self->reconnector_->drop(peer);
                self->farewells_.forget(peer);
              },
      });
  engine->context_.reset(new TransportContext{
      .id = id,
      .env = engine->options_.env,
      .jobKey = engine->options_.jobKey,
      .crypto = *crypto,
      .regions = engine->regions_,
      .arena = *engine->arena_,
      .life = engine->liveness_->wordOffset(),
      .loop = *engine->loop_,
      .dataLoops = dataLoops,
      .admits = [self](const EngineId& peer) { return self->connections_->admits(peer); },
      .peersReturn = engine->options_.peersReturn,
      .deadAfter = engine->options_.deadAfter,
      .onAccepted =
          [self](EngineId peer, std::shared_ptr<Channel> channel) {
            self->connections_->onAccepted(peer, std::move(channel));
          },
      .onMessage = [self](EngineId peer,
                          ByteView message) { self->topics_->deliver(peer, message); },
      .onEnded =
          [self](EngineId peer, const Evidence& evidence) {
            if (evidence.kind == Evidence::Kind::kUnreachable) {
              self->onBroken(peer, evidence);
            } else {
              self->onEnded(peer, evidence);
            }
          },
      .onReconnected = [self](EngineId peer) { self->reconnector_->reconnected(peer); },
  });

  for (const TransportEntry* entry : *chosen) {
    auto transport = entry->create(*engine->context_);
    if (transport.ok()) {
      engine->transports_.push_back(std::move(*transport));
    } else if (!engine->options_.env.transports.empty() ||
               transport.error().code == ErrorCode::kInvalidArgument) {
      // A requested transport that is missing or misconfigured is an error: no silent fallback.
      return Error{transport.error().code,
                   std::string("transport '") + entry->name + "': " + transport.error().message};
    } else {
      log(LogLevel::kInfo, engine->logName(), "transport ", entry->name,
          " is not used here: ", transport.error().message);
    }
  }
  if (engine->transports_.empty())
    return Error{ErrorCode::kUnsupported, "no transport works on this machine"};
  engine->openTopic(Farewells::kTopic, [self](const EngineId& from, ByteView message) {
    if (!self->farewells_.take(from, message))
      log(LogLevel::kWarning, self->logName(), "a farewell that does not decode is dropped");
  });
  if (engine->options_.idleAfter.count() > 0) engine->connections_->startCollecting();
  return engine;
}

Engine::~Engine() {
  // The handlers and the observer may refer to objects that no longer exist.
  topics_->closeAll();
  observe(nullptr);
  // First the channels say goodbye, then the transports shut down, then the loop ends.
  leave();
  loop_->runAndWait([this] { reconnector_->forgetAll(); });
  if (liveness_) liveness_->stop();
  for (auto& transport : transports_) transport->shutdown();
  // A channel that was accepted a moment ago may still be on its way to onAccepted().
  if (connections_) connections_->clear();
  loop_->stop();  // its tasks still use loop_ and the transports
  for (auto& data : dataLoops_) data->stop();
  // Peers may still read memory that we published. They have it mapped, and the mapping outlives
  // us, as it would after a death. So released memory keeps its contents. This protects the fence
  // words, too, which end with the transports: a fenced rank must not later read that it is
  // admitted again.
  retired_.free();
  arena_->keepContents();
  transports_.clear();
  messagePools_.reset();
  loop_.reset();
  retired_.abandon();
}

Bytes Engine::endpoint() const { return encodeEndpoint(context_->id, transports_); }

void Engine::forgetSoon(const std::shared_ptr<Peer>& peer) {
  loop_->post([this, peer] {
    // A caller of the peer is about to see that it has ended.
    if (!connections_->forget(peer, Deadline::after(Clock::duration::zero())).ok())
      loop_->runAt(Deadline::after(kForgetAgain), [this, peer] { forgetSoon(peer); });
  });
}

EngineCounters Engine::counters() const {
  const Connections::Counters peers = connections_->counters();
  const Outbox::Accepted sent = outbox_->accepted();
  EngineCounters now{.opened = peers.opened,
                     .reused = peers.reused,
                     .active = peers.active,
                     .pending = peers.pending,
                     .retries = peers.retries,
                     .connections = peers.connections,
                     .addresses = peers.addresses,
                     .collected = peers.collected,
                     .messages = sent.messages,
                     .messageBytes = sent.bytes,
                     .bytesRead = bytesRead_.load(std::memory_order_relaxed),
                     .bytesWritten = bytesWritten_.load(std::memory_order_relaxed)};
  for (const auto& transport : transports_) {
    const CardCounters moved = transport->cardCounters();
    now.byCards.read += moved.read;
    now.byCards.written += moved.written;
    now.byCards.retried += moved.retried;
  }
  return now;
}

size_t Engine::cardCount() const {
  size_t count = 0;
  for (const auto& transport : transports_) count += transport->cardCount();
  return count;
}

Status Engine::publish(uint64_t topic, ByteView message) {
  if (message.empty() || message.size() > CrashReport::kMostBytes) {
    return {ErrorCode::kInvalidArgument, "a crash report holds " +
                                             std::to_string(CrashReport::kMostBytes) +
                                             " bytes, not " + std::to_string(message.size())};
  }
  liveness_->crashReport().write(message);
  Lock lock(mutex_);
  publishedFor_ = topic;
  published_.assign(message.begin(), message.end());
  return {};
}

Status Engine::send(const EngineId& to, uint64_t topic, ByteView message) {
  const auto peer = connections_->find(to);
  if (!peer) return {ErrorCode::kInvalidArgument, "cannot send: that engine is not connected"};
  return send(*peer, topic, message);
}

Status Engine::send(Peer& peer, uint64_t topic, ByteView message) {
  return outbox_->send(peer, topic, message);
}

void Engine::watch(Interrupt* interrupt, Doorbell* bell) {
  Lock lock(mutex_);
  watchers_.emplace_back(interrupt, bell);
}

void Engine::unwatch(Interrupt* interrupt) {
  Lock lock(mutex_);
  const auto found = std::ranges::find(watchers_, interrupt, [](const auto& w) { return w.first; });
  if (found != watchers_.end()) watchers_.erase(found);
}

}  // namespace mooncake
