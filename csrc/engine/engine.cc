#include "engine/engine.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <future>
#include <poll.h>
#include <random>
#include <sys/random.h>

#include "base/descriptors.h"
#include "base/log.h"
#include "engine/route.h"
#include "engine/transports/registry.h"

namespace mooncake {
namespace {

// To the start of the liveness thread, from the first connections and, if that is sooner, from when
// all have connected to all; a death before that shows as the end of a socket.
constexpr auto kStarting = std::chrono::milliseconds(20);
constexpr auto kStarted = std::chrono::milliseconds(2);

// While connections are made: how long nobody may come of those that have published their address.
constexpr auto kLeastPatience = std::chrono::seconds(1);
constexpr auto kPatiencePerRank = std::chrono::milliseconds(10);

// What an engine says of how it leaves, right before its goodbye.
// Wire form:  u8 version  u8 how  string why
constexpr uint64_t kFarewellTopic = 2;
constexpr uint8_t kFarewellVersion = 1;
constexpr size_t kMostFarewellText = 512;

// Of a peer that has been let in: until its channel is there.
constexpr auto kAdmitted = std::chrono::seconds(1);
// Between two calls for a channel that crossed the peer's, or its end; doubles, and jitters.
constexpr auto kLeastPause = std::chrono::microseconds(500);
constexpr auto kMostPause = std::chrono::milliseconds(50);

constexpr size_t kMostOutboxBytes = size_t(16) << 20;

// The transports to use, best first: all that are built in, or the ones that were asked for, in
// that order.
Result<std::vector<const TransportEntry*>> chooseTransports(const Env& env) {
  std::vector<const TransportEntry*> chosen;
  const auto& registry = transportRegistry();
  if (env.transports.empty()) {
    for (const auto& entry : registry) {
      if (!entry.isForTests) chosen.push_back(&entry);
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
  std::vector<EventLoop*> dataLoops;
  for (size_t i = 0; i < engine->options_.dataThreads; ++i) {
    auto data = EventLoop::start("mooncake-data");
    if (!data.ok()) return data.error();
    dataLoops.push_back(data->get());
    engine->dataLoops_.push_back(std::move(*data));
  }
  engine->topics_ = std::make_unique<MessageRouter>(*engine->loop_);
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
                              // What has come meanwhile is read first: our own loop may be what is
                              // slow.
                              self->loop_->post([self, silent = std::move(silent)] {
                                self->loop_->post([self, silent] { self->onSilent(silent); });
                              });
                            }});
  if (!liveness.ok()) return liveness.error();
  engine->liveness_ = std::move(*liveness);
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
      .admits = [self](const EngineId& peer) { return self->admits(peer); },
      .peersReturn = engine->options_.peersReturn,
      .onAccepted =
          [self](EngineId peer, std::shared_ptr<Channel> channel) {
            self->onAccepted(peer, std::move(channel));
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
      // Asked for and missing, or set up wrongly, is an error, never a silent fallback.
      return Error{transport.error().code,
                   std::string("transport '") + entry->name + "': " + transport.error().message};
    } else {
      log(LogLevel::kInfo, engine->logName(), "transport ", entry->name,
          " is not used here: ", transport.error().message);
    }
  }
  if (engine->transports_.empty())
    return Error{ErrorCode::kUnsupported, "no transport works on this machine"};
  engine->openTopic(kFarewellTopic, [self](const EngineId& from, ByteView message) {
    self->onFarewell(from, message);
  });
  return engine;
}

Engine::~Engine() {
  // Whoever listened may be gone.
  topics_->closeAll();
  observe(nullptr);
  // Channels say goodbye first; then nothing of a transport begins any more; then the loop ends.
  leave();
  runOnLoop([this] { reconnector_->forgetAll(); });
  if (liveness_) liveness_->stop();
  for (auto& transport : transports_) transport->shutdown();
  {
    // A channel that was accepted a moment ago may still be on its way to onAccepted().
    std::map<EngineId, std::shared_ptr<Peer>> peers;  // end without the lock, which onEnded() takes
    std::lock_guard lock(mutex_);
    peers.swap(peers_);
  }
  loop_->stop();  // what runs there still uses loop_ and the transports
  for (auto& data : dataLoops_) data->stop();
  // Whoever may still read what we gave has it mapped, and has it still when we are gone: as after
  // a death. So have the fence words, which end with the transports: a rank that was shut out and
  // looks at its word later must not find that it was let in again.
  std::erase_if(retired_, [](const Retired& retired) { return retired.isFree(); });
  arena_->keepContents();
  transports_.clear();
  loop_.reset();
  for (Retired& retired : retired_) {
    for (RetiredMemory& memory : retired.memory) memory.region.abandon();
  }
}

void Engine::retire(std::vector<RetiredMemory> memory, std::function<bool()> isFree) {
  std::lock_guard lock(retiredMutex_);
  retired_.push_back({std::move(memory), std::move(isFree)});
  std::erase_if(retired_, [](const Retired& retired) { return retired.isFree(); });
}

void Engine::leave(const Farewell& farewell) {
  std::map<EngineId, std::shared_ptr<Peer>> peers;
  uint64_t publishedFor;
  Bytes published;
  const bool waits = !loop_->onLoopThread();
  if (waits) {  // until it has seen what has broken by now
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
  // First: whoever reads our goodbye must not have taken our end for a death before.
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
  sendOutbox();  // the goodbye comes after it
  for (auto& [id, peer] : peers) peer->channel->close();
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

// A goodbye means what its sender said of it.
Evidence Engine::withFarewell(const EngineId& id, const Evidence& evidence) const {
  const auto said = farewells_.find(id);
  if (!evidence.isGoodbye() || said == farewells_.end()) return evidence;
  if (said->second.how == Farewell::How::kFailed)
    return {Evidence::Kind::kFailed, said->second.why, evidence.when};
  return {Evidence::Kind::kEnded, "its program ended without destroy_process_group()",
          evidence.when};
}

Bytes Engine::endpoint() const { return encodeEndpoint(context_->id, transports_); }

// Under the lock.
std::shared_ptr<Peer> Engine::remember(const EngineId& id, std::shared_ptr<Channel> channel,
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
    liveness_->watch(id, peer->channel);
  }
  peers_[id] = peer;
  if (isBroken) loop_->post([this, id, how = early.mapped()] { onBroken(id, how); });
  return peer;
}

// A peer may have connected and left again before we look: it counts as connected, and whoever uses
// it finds that it is disconnected. An engine's id is never used again, so nothing comes after.
std::shared_ptr<Peer> Engine::known(const EngineId& id) const {
  const auto found = peers_.find(id);
  return found == peers_.end() ? nullptr : found->second;
}

Result<std::vector<std::shared_ptr<Peer>>> Engine::connect(const std::vector<Bytes>& endpoints,
                                                           Deadline deadline) {
  std::vector<EngineId> ids(endpoints.size());
  for (size_t i = 0; i < endpoints.size(); ++i) {
    auto id = endpointOwner(endpoints[i]);
    if (!id.ok()) return id.error();
    ids[i] = *id;
    std::lock_guard lock(mutex_);
    endpoints_[*id] = endpoints[i];
  }
  size_t strangers = 0;
  {
    std::lock_guard lock(mutex_);
    for (const EngineId& one : ids) strangers += one != id() && !known(one);
  }
  MOONCAKE_TRY(
      checkDescriptors(strangers, "connecting to " + std::to_string(strangers) + " more ranks"));
  // The ranks of a large job learn the addresses one after the other.
  const auto patience = std::max<Clock::duration>(options_.env.failureTimeout, kLeastPatience) +
                        kPatiencePerRank * int64_t(endpoints.size());
  MOONCAKE_TRY(callAll(ids, endpoints, deadline, patience));

  const auto began = Clock::now();
  std::vector<std::shared_ptr<Peer>> peers(endpoints.size());
  std::unique_lock lock(mutex_);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] == id()) continue;
    const auto there = [&] { return (peers[i] = known(ids[i])) != nullptr; };
    const std::string name = "rank " + std::to_string(i);
    // Somebody who has published its address calls at once. As long as others still do, all is
    // well.
    Clock::time_point giveUp;
    do {
      const auto quiet = std::max(lastArrival_, began) + patience;
      giveUp = std::min(deadline.when(), quiet);
    } while (!arrived_.wait_until(lock, giveUp, there) && Clock::now() < deadline.when() &&
             std::max(lastArrival_, began) + patience > giveUp);
    if (!peers[i]) {
      return Error{ErrorCode::kTimeout,
                   name +
                       " published its address but did not connect in time: is it alive, and can "
                       "it reach this host?"};
    }
    if (peers[i]->name.empty()) peers[i]->name = name;
  }
  // Later, for the same reason as in startSilenceDetection().
  loop_->runAt(Deadline::after(kStarting), [this] { liveness_->begin(); });
  return peers;
}

// All calls that are ours to make, many at a time: the peers answer side by side, and whoever
// answers is served at once, so no two engines can wait for each other's turn.
Status Engine::callAll(const std::vector<EngineId>& ids, const std::vector<Bytes>& endpoints,
                       Deadline deadline, Clock::duration patience) {
  struct Call {
    size_t index;
    std::unique_ptr<Connecting> connecting;
  };
  constexpr size_t kMaxCalls = 64;  // of descriptors, and of what a peer must hold for us
  // Peers answer on their loops' threads: whoever waits here for its turn waits for no other rank.
  std::lock_guard calling(callMutex_);
  std::vector<size_t> due;
  // Everybody begins with the next one after itself, so that not all call the same one at once.
  const size_t self = size_t(std::find(ids.begin(), ids.end(), id()) - ids.begin());
  for (size_t step = ids.size(); step >= 1; --step) {
    const size_t i = (self + step) % ids.size();
    std::lock_guard lock(mutex_);
    if (id() < ids[i] && !known(ids[i])) due.push_back(i);
  }
  const auto ends = [this](const EngineId& peer) {
    std::lock_guard lock(mutex_);
    calling_.erase(peer);
    arrived_.notify_all();
  };

  std::vector<Call> calls;
  std::vector<pollfd> sockets;
  const auto failed = [&](size_t index, const Error& why) {
    for (const Call& call : calls) ends(ids[call.index]);
    ends(ids[index]);
    return Status(why.code, "cannot connect to rank " + std::to_string(index) + ": " + why.message);
  };
  while (!due.empty() || !calls.empty()) {
    while (!due.empty() && calls.size() < kMaxCalls) {
      const size_t i = due.back();
      {
        std::lock_guard lock(mutex_);
        // Somebody opens it, or it has opened us: it comes.
        if (known(ids[i]) || isComing(ids[i]) || !calling_.insert(ids[i]).second) {
          due.pop_back();
          continue;
        }
      }
      auto connecting =
          openRoute(transports_, ids[i], endpoints[i], deadline.earlier(Deadline::after(patience)));
      if (!connecting.ok()) return failed(i, connecting.error());
      calls.push_back({i, std::move(*connecting)});
      due.pop_back();
    }
    sockets.clear();
    for (auto call = calls.begin(); call != calls.end();) {
      auto channel = call->connecting->advance();
      if (!channel.ok() && channel.error().code == ErrorCode::kInterrupted) {
        ends(ids[call->index]);  // it has opened us, and comes
        call = calls.erase(call);
        continue;
      }
      if (!channel.ok()) return failed(call->index, channel.error());
      if (!*channel) {
        call->connecting->addSockets(sockets);
        ++call;
        continue;
      }
      log(LogLevel::kInfo, logName(), "connected to rank ", call->index, " over ",
          (*channel)->transportName());
      {
        std::lock_guard lock(mutex_);
        remember(ids[call->index], std::move(*channel), true);
      }
      ends(ids[call->index]);
      call = calls.erase(call);
    }
    if (calls.empty() || (!due.empty() && calls.size() < kMaxCalls)) continue;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.left()).count();
    if (::poll(sockets.data(), sockets.size(), int(std::min<int64_t>(left, 1000))) < 0 &&
        errno != EINTR)
      return failed(calls.front().index, systemError("poll", errno));
  }
  return {};
}

// Under the lock.
bool Engine::isComing(const EngineId& id) const {
  const auto found = admitted_.find(id);
  return found != admitted_.end() && Clock::now() < found->second;
}

// On the loop's thread. Of two calls that cross, the one of the smaller id counts, so the engine
// with the smaller id does not let the other one in while it calls itself. Whoever has been let in
// is waited for before it is called.
bool Engine::admits(const EngineId& id) {
  std::lock_guard lock(mutex_);
  const auto peer = known(id);
  // It makes its connection again, or its goodbye is still on its way.
  if (peer && !peer->disconnected) return !peer->isOurs && peer->channel->isMadeAgain();
  if (calling_.contains(id) && this->id() < id) return false;
  const auto now = Clock::now();
  std::erase_if(admitted_, [&](const auto& entry) { return entry.second <= now; });
  admitted_[id] = now + kAdmitted;
  return true;
}

Result<std::shared_ptr<Peer>> Engine::open(ByteView endpoint, std::string name, Deadline deadline) {
  const auto owner = endpointOwner(endpoint);
  if (!owner.ok()) return owner.error();
  const EngineId id = *owner;
  if (id == this->id()) return std::shared_ptr<Peer>();
  std::minstd_rand random(std::random_device{}());
  Clock::duration pause = kLeastPause;
  for (bool isFirst = true;; isFirst = false) {
    {
      std::unique_lock lock(mutex_);
      for (;;) {
        const auto peer = known(id);
        if (peer && !peer->disconnected) {
          if (peer->name.empty()) peer->name = name;
          counters_.reused += isFirst;
          return peer;
        }
        // Another thread calls it, or it has called us.
        if (!calling_.contains(id) && !isComing(id)) break;
        const auto coming = admitted_.find(id);
        const auto until =
            coming == admitted_.end() ? deadline.when() : std::min(deadline.when(), coming->second);
        arrived_.wait_until(lock, until);
        if (deadline.passed())
          return Error{ErrorCode::kTimeout, "cannot connect to " + name + ": it did not in time"};
      }
      calling_.insert(id);
      endpoints_[id] = Bytes(endpoint.begin(), endpoint.end());
      counters_.retries += !isFirst;
    }
    auto channel = call(id, endpoint, deadline);
    std::unique_lock lock(mutex_);
    calling_.erase(id);
    arrived_.notify_all();
    if (channel.ok()) {
      const auto peer = remember(id, std::move(*channel), true);
      peer->name = name;
      return peer;
    }
    if (channel.error().code != ErrorCode::kInterrupted || deadline.passed()) {
      return Error{channel.error().code,
                   "cannot connect to " + name + ": " + channel.error().message};
    }
    // Its own call comes, or it is about to see that the last channel has ended.
    const auto jitter = pause * int64_t(random() % 512) / 1024;
    const auto there = [&] {
      const auto peer = known(id);
      return (peer && !peer->disconnected) || isComing(id);
    };
    arrived_.wait_until(lock, std::min(deadline.when(), Clock::now() + pause / 2 + jitter), there);
    pause = std::min<Clock::duration>(2 * pause, kMostPause);
  }
}

Result<std::shared_ptr<Channel>> Engine::call(const EngineId& id, ByteView endpoint,
                                              Deadline deadline) {
  auto connecting = openRoute(transports_, id, endpoint, deadline);
  if (!connecting.ok()) return connecting.error();
  for (std::vector<pollfd> sockets;; sockets.clear()) {
    auto channel = (*connecting)->advance();
    if (!channel.ok() || *channel) return channel;
    (*connecting)->addSockets(sockets);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.left()).count();
    if (::poll(sockets.data(), sockets.size(), int(std::clamp<int64_t>(left, 0, 1000))) < 0 &&
        errno != EINTR)
      return systemError("poll", errno);
  }
}

void Engine::forget(const std::shared_ptr<Peer>& peer) {
  const EngineId id = peer->id;
  {
    std::unique_lock lock(mutex_);
    arrived_.wait(lock, [&] { return !calling_.contains(id); });
    if (known(id) != peer) return;  // it has been forgotten, or called anew
    calling_.insert(id);
  }
  peer->channel->close();
  liveness_->unwatch(id);
  // Behind all that was seen of it.
  runOnLoop([this, id] {
    reconnector_->drop(id);
    farewells_.erase(id);
  });
  std::lock_guard lock(mutex_);
  if (!peer->disconnected) {
    peer->evidence = {Evidence::Kind::kGoodbye, "it was forgotten here"};
    peer->disconnected = true;
  }
  peers_.erase(id);
  endpoints_.erase(id);
  endedEarly_.erase(id);
  calling_.erase(id);
  arrived_.notify_all();
}

EngineCounters Engine::counters() const {
  std::lock_guard lock(mutex_);
  EngineCounters now = counters_;
  for (const auto& [id, peer] : peers_) now.active += !peer->disconnected;
  now.pending = calling_.size();
  return now;
}

void Engine::onAccepted(const EngineId& id, std::shared_ptr<Channel> channel) {
  std::lock_guard lock(mutex_);
  remember(id, std::move(channel), false);
  admitted_.erase(id);
  lastArrival_ = Clock::now();
  arrived_.notify_all();
}

// The socket's end comes when the kernel has cleared away all memory of the process; the mark on
// its life word comes before that. On the loop's thread like every other end, so that ends are
// reported one after the other.
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
      if (!peers_.empty()) loop_->runAt(Deadline::after(kStarting), [this] { liveness_->begin(); });
      for (const auto& [id, peer] : peers_) {
        if (peer->disconnected) disconnected.push_back(peer);
      }
    }
    for (const auto& peer : disconnected) observer_({peer->id}, peer->evidence);
  });
}

// Returns when the task has run.
void Engine::runOnLoop(std::function<void()> task) {
  if (loop_->onLoopThread()) return task();
  const auto done = std::make_shared<std::promise<void>>();
  loop_->post([done, task = std::move(task)] {
    task();
    done->set_value();
  });
  done->get_future().wait();
}

// A moment later: the others are just coming out of the barrier, and a thread more is not what they
// wait for.
void Engine::startSilenceDetection() {
  liveness_->startSilenceDetection();
  loop_->runAt(Deadline::after(kStarted), [this] { liveness_->begin(); });
}

Status Engine::publish(uint64_t topic, ByteView message) {
  if (message.empty() || message.size() > CrashReport::kMostBytes) {
    return {ErrorCode::kInvalidArgument, "a crash report holds " +
                                             std::to_string(CrashReport::kMostBytes) +
                                             " bytes, not " + std::to_string(message.size())};
  }
  liveness_->crashReport().write(message);
  std::lock_guard lock(mutex_);
  publishedFor_ = topic;
  published_.assign(message.begin(), message.end());
  return {};
}

bool Peer::hasExited() const {
  if (disconnected.load(std::memory_order_acquire) && evidence.kind == Evidence::Kind::kExited)
    return true;
  // After a goodbye nobody watches its life word any more.
  return process.isEnding();
}

std::optional<Bytes> Peer::lastReport() const {
  const PeerLife life = channel->peerLife();
  if (!life.word) return std::nullopt;
  return life.word->crashReport.read();
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
  peer->channel->beat();  // so that the other end has heard of us
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
    const std::string& name = found->second->name;
    // A goodbye is no accusation. Who observes says what follows, and from what.
    log(evidence.isGoodbye() || observer_ ? LogLevel::kInfo : LogLevel::kWarning, logName(),
        name.empty() ? "a peer" : name, " is gone: ", evidence.detail);
    for (auto& [interrupt, bell] : watchers_) {
      interrupt->bump();
      bell->ring();
    }
  }
  tell({id}, evidence);
}

Status Engine::send(const EngineId& to, uint64_t topic, ByteView message) {
  std::shared_ptr<Peer> peer;
  {
    std::lock_guard lock(mutex_);
    peer = known(to);
  }
  if (!peer) return {ErrorCode::kInvalidArgument, "cannot send: that engine is not connected"};
  return send(*peer, topic, message);
}

Status Engine::send(Peer& peer, uint64_t topic, ByteView message) {
  if (message.empty() || message.size() > MessageRouter::kMostBytes) {
    return {ErrorCode::kInvalidArgument, "a message has 1 to " +
                                             std::to_string(MessageRouter::kMostBytes) +
                                             " bytes, not " + std::to_string(message.size())};
  }
  if (peer.disconnected) return {ErrorCode::kPeerLost, peer.evidence.detail};
  bool isFirst;
  {
    std::lock_guard lock(outboxMutex_);
    if (outboxBytes_ + message.size() > kMostOutboxBytes)
      return {ErrorCode::kExhausted, "16 MiB of messages wait for the thread that sends them"};
    isFirst = outbox_.empty();
    outbox_.emplace_back(peer.shared_from_this(), MessageRouter::encode(topic, message));
    outboxBytes_ += message.size();
  }
  // Not from this thread: a channel's lock is held while a transfer is copied to its socket.
  if (loop_->onLoopThread()) {
    sendOutbox();
  } else if (isFirst) {
    loop_->post([this] { sendOutbox(); });
  }
  return {};
}

void Engine::sendOutbox() {
  std::lock_guard sending(sendingMutex_);
  std::vector<std::pair<std::shared_ptr<Peer>, Bytes>> due;
  {
    std::lock_guard lock(outboxMutex_);
    due.swap(outbox_);
    outboxBytes_ = 0;
  }
  for (const auto& [peer, message] : due) {
    const Status sent = peer->channel->send(message);
    // A channel's end is reported as such.
    if (sent.code() == ErrorCode::kExhausted)
      log(LogLevel::kWarning, logName(), "a message is lost: ", sent.error().message);
  }
}

void Engine::watch(Interrupt* interrupt, Doorbell* bell) {
  std::lock_guard lock(mutex_);
  watchers_.emplace_back(interrupt, bell);
}

void Engine::unwatch(Interrupt* interrupt) {
  std::lock_guard lock(mutex_);
  std::erase_if(watchers_, [&](const auto& watcher) { return watcher.first == interrupt; });
}

}  // namespace mooncake
