#include "transfer/transfer_engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "base/failpoint.h"
#include "base/fork.h"
#include "base/log.h"
#include "transfer/call_guard.h"
#include "transfer/local_copy.h"
#include "transfer/protocol.h"
#include "transfer/session_socket.h"
#include "transfer/topology.h"

namespace mooncake::transfer {
namespace {

// How long an unused connection stays open, and the records of a peer that is gone are kept.
constexpr auto kIdle = std::chrono::seconds(60);
constexpr auto kCancelPause = std::chrono::milliseconds(10);
// Least address space of the arena: a process may map the arenas of many engines.
constexpr size_t kArenaBytes = size_t(8) << 30;

}  // namespace

Result<std::shared_ptr<TransferEngine>> TransferEngine::open(TransferEngineOptions options) {
  std::shared_ptr<TransferEngine> engine(new TransferEngine, [](TransferEngine* ended) {
    if (ended->forkGeneration_ == forkGeneration()) delete ended;
  });
  engine->forkGeneration_ = forkGeneration();
  MOONCAKE_TRY(engine->start(std::move(options)));
  return engine;
}

Status TransferEngine::start(TransferEngineOptions options) {
  env_ = std::move(options.env);
  auto settings = TransferEnv::read();
  if (!settings.ok()) return settings.status();
  settings_ = std::move(*settings);
  logName_ = "engine " + options.localName;
  if (settings_.leastRpcPort > settings_.mostRpcPort)
    return {ErrorCode::kInvalidArgument, "MC_MIN_RPC_PORT is larger than MC_MAX_RPC_PORT"};
  if (!options.devices.empty()) env_.fabricDevices = listOf(options.devices);
  const auto protocol = selectProtocol(env_, settings_, options.protocol, logName_);
  if (!protocol.ok()) return protocol.status();
  protocol_ = *protocol;
  auto metadata = Metadata::open(settings_, options.metadataServer);
  if (!metadata.ok()) return metadata.status();
  metadata_ = std::move(*metadata);

  SessionId own;
  if (!options.localName.empty()) {
    auto parsed = SessionId::parse(options.localName);
    if (!parsed.ok()) return parsed.status();
    own = std::move(*parsed);
  }
  uint16_t port = options.rpcPort;
  constexpr uint16_t kUsualPort = 12001;
  if (settings_.usesGivenRpcPort && !metadata_->namesAreSessions())
    port = own.port ? own.port : kUsualPort;
  if (!options.host.empty()) {
    const auto host = SessionId::parse(options.host);
    if (!host.ok()) return host.status();
    own.host = host->host;
  }
  // A name in a metadata server need not be an address of this host.
  const bool isAddress = metadata_->namesAreSessions() || !options.host.empty();
  auto listener = listenForSessions(env_, settings_, own.host, isAddress, port);
  if (!listener.ok()) return listener.status();
  rpcPort_ = listener->port;
  if (own.host.empty() || !isAddress) own.host = listener->address;
  session_ = SessionId{own.host, rpcPort_}.text();
  const std::string name = metadata_->namesAreSessions() ? session_ : options.localName;
  logName_ = "engine " + name;

  EngineOptions engineOptions{.env = env_,
                              .logName = logName_,
                              .dataThreads = settings_.tcpIoThreads,
                              .peersReturn = true,
                              .idleAfter = kIdle,
                              .deadAfter = settings_.timeout};
  engineOptions.env.arenaBytes = std::max(env_.arenaBytes, kArenaBytes);
  engineOptions.env.hostIp = listener->address;
  hasKey_ = env_.jobKey.has_value();
  if (hasKey_) {
    const auto key = std::as_bytes(std::span(*env_.jobKey));
    engineOptions.jobKey.assign(key.begin(), key.end());
  } else {
    engineOptions.jobKey = publicKey();
  }
  const Bytes key = engineOptions.jobKey;
  auto engine = Engine::create(std::move(engineOptions));
  if (!engine.ok()) return engine.status();
  engine_ = std::move(*engine);
  auto crypto = Crypto::load();
  if (!crypto.ok()) return crypto.status();
  const auto context = [&](const EngineId& id) {
    return std::unique_ptr<TransportContext>(new TransportContext{.id = id,
                                                                  .env = env_,
                                                                  .jobKey = key,
                                                                  .crypto = *crypto,
                                                                  .regions = engine_->regions(),
                                                                  .arena = engine_->arena(),
                                                                  .life = 0,
                                                                  .loop = engine_->loop()});
  };
  askContext_ = context(engine_->id());
  answerContext_ = context(kSessionListener);

  memory_ = std::make_unique<RegisteredMemory>(engine_->regions());
  pool_ = std::make_unique<ManagedPool>(*memory_,
                                        [engine = engine_.get()] { return engine->lateWriters(); });
  std::string why;
  if (pool_->open(engine_->arena(), why) != kGood)
    return {ErrorCode::kExhausted, "memory for managed buffers: " + why};
  notifications_ = std::make_unique<Notifications>(*engine_);
  auto closing = StopSignal::make();
  if (!closing.ok()) return closing.status();
  closing_ = std::move(*closing);
  segmentContext_.reset(new SegmentContext{*askContext_, *engine_, *memory_, *metadata_, *closing_,
                                           settings_.sessionTimeout});
  directory_ = std::make_unique<Directory>(*segmentContext_, name);
  slots_ = std::make_unique<SlotPool>(settings_.mostTransfers);
  driverContext_.reset(new DriverContext{*engine_, *slots_, askers_, stopping_,
                                         stopping_.generation(), ended_, bells_, logName_});
  auto incarnation = incarnationOf(engine_->endpoint());
  if (!incarnation.ok()) return incarnation.status();
  keeper_ = std::make_unique<NameKeeper>(
      *metadata_,
      [this](const std::string& session, Deadline deadline) {
        return askHolder(*askContext_, session, deadline, *closing_);
      },
      NameKeeper::Options{.name = name,
                          .record = {.session = session_, .incarnation = std::move(*incarnation)},
                          .logName = logName_,
                          .patience = settings_.sessionTimeout});
  auto server = SessionServer::start(*answerContext_, std::move(listener->socket),
                                     [this] { return describe(); });
  if (!server.ok()) return server.status();
  server_ = std::move(*server);
  MOONCAKE_TRY(keeper_->publish());
  log(LogLevel::kInfo, logName_, "answers at ", session_, ", protocol ", protocol_);
  return {};
}

TransferEngine::~TransferEngine() { close(); }

void TransferEngine::close() {
  std::vector<std::thread> workers;
  {
    Lock lock(mutex_);
    if (std::exchange(isClosed_, true)) return;
    workers.swap(workers_);
    stopping_.bump();
    for (Doorbell* bell : drivers_) bell->ring();
  }
  if (closing_) closing_->stop();
  if (notifications_) notifications_->stop();
  ended_.ring();
  queue_.stop();
  for (std::thread& worker : workers) worker.join();
  failpoint("workers-ended");
  // A call that is still inside may submit a batch now, and another one may wait for that batch. A
  // stream in transferOnStream() does both. So a driver cancels batches until all calls have left.
  const auto cancelBatches = [this] {
    if (driverContext_) Driver(*driverContext_, queue_).run();
  };
  do {
    cancelBatches();
  } while (!calls_.close(Deadline::after(kCancelPause)));
  cancelBatches();
  onStreams_.stop();  // every transfer is over
  followUps_.stop();
  askers_.stop();
  if (keeper_) keeper_->retract();
  if (server_) server_->stop();
  if (engine_) engine_->leave();
}

std::shared_ptr<Engine> TransferEngine::lend(const std::shared_ptr<TransferEngine>& self) {
  Lock lock(mutex_);
  if (isClosed_ || !lent_.expired()) return nullptr;
  const auto held = std::make_shared<const std::shared_ptr<TransferEngine>>(self);
  lent_ = held;
  return std::shared_ptr<Engine>(held, engine_.get());
}

Code TransferEngine::fail(Code code, const std::string& what) const {
  log(LogLevel::kWarning, logName_, what, " (", int(code), ")");
  return code;
}

Deadline TransferEngine::deadlineOf(uint64_t bytes) const {
  return Deadline::after(settings_.timeout + std::chrono::nanoseconds(bytes));
}

// On the loop's thread.
std::shared_ptr<const Bytes> TransferEngine::describe() {
  const uint64_t version = memory_->version();
  Lock lock(mutex_);
  if (isClosed_) return nullptr;
  if (!description_ || describedVersion_ != version) {
    // An empty name makes peers that knew this one ask the metadata server again.
    const SegmentDescription all{.name = keeper_->isRetracted() ? std::string() : name(),
                                 .protocol = protocol_,
                                 .endpoint = engine_->endpoint(),
                                 .buffers = memory_->list()};
    description_ = std::make_shared<const Bytes>(all.encode());
    describedVersion_ = version;
  }
  return description_;
}

TransferLimits TransferEngine::limits() const {
  return {.transfers = settings_.mostTransfers,
          .ioThreads = settings_.tcpIoThreads,
          .registrations = RegisteredMemory::kMost,
          .batchedTransfers = BatchTable::kMostTasks};
}

// ---- memory

Code TransferEngine::registerMemory(uint64_t address, uint64_t bytes, const std::string& location,
                                    bool isRemoteAccessible) {
  const Call call(*this);
  if (!call) return kContext;
  std::string why;
  const Code code = memory_->add(
      address, bytes, {.location = location, .isRemoteAccessible = isRemoteAccessible}, why);
  if (code != kGood) return fail(code, "memory is not registered: " + why);
  keeper_->renewSoon();
  return kGood;
}

Code TransferEngine::unregisterMemory(uint64_t address) {
  const Call call(*this);
  if (!call) return kContext;
  std::string why;
  const Code code = memory_->remove(address, why);
  return code == kGood ? code : fail(code, "memory is not unregistered: " + why);
}

Code TransferEngine::registerMemory(std::span<const Range> ranges, const std::string& location) {
  for (size_t i = 0; i < ranges.size(); ++i) {
    const Code code = registerMemory(ranges[i].address, ranges[i].bytes, location);
    if (code == kGood) continue;
    while (i-- > 0) (void)unregisterMemory(ranges[i].address);
    return code;
  }
  return kGood;
}

Code TransferEngine::unregisterMemory(std::span<const uint64_t> addresses) {
  Code first = kGood;
  for (const uint64_t address : addresses) {
    const Code code = unregisterMemory(address);
    if (first == kGood) first = code;
  }
  return first;
}

uint64_t TransferEngine::allocateManaged(uint64_t bytes) {
  const Call call(*this);
  if (!call) return 0;
  std::string why;
  const uint64_t address = pool_->allocate(bytes, why);
  if (address == 0) (void)fail(kMemory, "no managed buffer: " + why);
  return address;
}

Code TransferEngine::freeManaged(uint64_t address, uint64_t bytes) {
  const Call call(*this);
  if (!call) return kContext;
  std::string why;
  const Code code = pool_->free(address, bytes, why);
  return code == kGood ? code : fail(code, "a managed buffer is not freed: " + why);
}

Code TransferEngine::writeHere(uint64_t address, ByteView bytes) {
  const Call call(*this);
  if (!call) return kContext;
  const auto buffer = memory_->find(address, bytes.size());
  if (!buffer) return fail(kNotRegistered, "bytes are written to memory that is not registered");
  if (!buffer->isWritable) return fail(kInvalid, "bytes are written to memory that is read-only");
  const Status copied = copyLocal({reinterpret_cast<std::byte*>(address), buffer->owner},
                                  {const_cast<std::byte*>(bytes.data()), {}}, bytes.size());
  return copied.ok() ? kGood : fail(kInvalid, "bytes are not written: " + copied.error().message);
}

Code TransferEngine::readHere(uint64_t address, std::span<std::byte> bytes) {
  const Call call(*this);
  if (!call) return kContext;
  const auto buffer = memory_->find(address, bytes.size());
  if (!buffer) return fail(kNotRegistered, "bytes are read from memory that is not registered");
  const Status copied = copyLocal(
      {bytes.data(), {}}, {reinterpret_cast<std::byte*>(address), buffer->owner}, bytes.size());
  return copied.ok() ? kGood : fail(kInvalid, "bytes are not read: " + copied.error().message);
}

// ---- peers

std::shared_ptr<Segment> TransferEngine::openSegment(const std::string& name, Code* code) {
  const Call call(*this);
  if (code) *code = call ? kGood : kContext;
  if (!call) return nullptr;
  auto segment = directory_->open(name, deadlineOf(0));
  if (segment.ok()) return *segment;
  const Code why = fail(codeOf(segment.error().code),
                        "segment \"" + name + "\" cannot be opened: " + segment.error().message);
  if (code) *code = why;
  return nullptr;
}

Code TransferEngine::refresh(Segment& segment) {
  const Call call(*this);
  if (!call) return kContext;
  const Status asked = segment.refresh(segment.generation(), deadlineOf(0));
  return asked.ok() ? kGood : fail(codeOf(asked.code()), asked.error().message);
}

Code TransferEngine::retract() {
  const Call call(*this);
  if (!call) return kContext;
  keeper_->retract();
  Lock lock(mutex_);
  description_.reset();
  return kGood;
}

std::string TransferEngine::describeLinks(bool asJson) {
  const Call call(*this);
  std::map<std::string, std::string> links;
  if (call) {
    for (const auto& segment : directory_->all()) {
      const auto peer = segment->peer(deadlineOf(0));
      links[segment->name()] = !peer.ok() || (*peer && (*peer)->disconnected) ? "none"
                               : *peer ? (*peer)->channel->transportName()
                                       : "local";
    }
  }
  return transfer::describeLinks(topologyOf(env_.fabricDevices), links, asJson);
}

Code TransferEngine::refreshSegments() {
  const Call call(*this);
  if (!call) return kContext;
  const Status asked = directory_->refresh(deadlineOf(0));
  return asked.ok() ? kGood : fail(codeOf(asked.code()), asked.error().message);
}

uint64_t TransferEngine::firstBuffer(const std::string& name) {
  const Call call(*this);
  const auto segment = call ? openSegment(name) : nullptr;
  if (!segment) return 0;
  const auto address = segment->firstBuffer(deadlineOf(0));
  if (address.ok()) return *address;
  (void)fail(codeOf(address.error().code), address.error().message);
  return 0;
}

Code TransferEngine::probe(const std::string& name) {
  const Call call(*this);
  if (!call) return kContext;
  const Status answered = directory_->probe(name, Deadline::after(settings_.sessionTimeout));
  if (answered.ok()) return kGood;
  return fail(codeOf(answered.code()), "probe: " + answered.error().message);
}

Result<std::shared_ptr<Peer>> TransferEngine::livePeer(Segment& segment) {
  auto peer = segment.peer(deadlineOf(0));
  if (!peer.ok() || !*peer || !(*peer)->disconnected) return peer;
  MOONCAKE_TRY(segment.refresh(segment.generation(), deadlineOf(0)));
  return segment.peer(deadlineOf(0));
}

Code TransferEngine::warmUp(const std::string& name) {
  const Call call(*this);
  if (!call) return kContext;
  Code code = kGood;
  const auto segment = openSegment(name, &code);
  if (!segment) return code;
  const auto peer = livePeer(*segment);
  if (!peer.ok()) return fail(codeOf(peer.error().code), peer.error().message);
  if (!*peer) return kGood;

  struct Outcome {
    Doorbell bell;
    Status how;
    std::atomic<bool> isThere{false};
  };
  const auto outcome = std::make_shared<Outcome>();
  const auto regions = segment->regions(deadlineOf(0));
  if (!regions.ok()) return fail(codeOf(regions.error().code), regions.error().message);
  const uint32_t generation = stopping_.generation();
  {
    Lock lock(mutex_);
    if (isClosed_) return kContext;
    drivers_.insert(&outcome->bell);
  }
  const Deadline deadline = deadlineOf(0);
  (*peer)->channel->warmUp(*regions, deadline, [outcome](Status how) {
    outcome->how = std::move(how);
    outcome->isThere.exchange(true);
    outcome->bell.ring();
  });
  const Waiter waiter{outcome->bell, stopping_, generation, deadline, SpinPolicy::forMessages()};
  const WaitResult waited = waiter.until([&] { return outcome->isThere.load(); });
  {
    Lock lock(mutex_);
    drivers_.erase(&outcome->bell);
  }
  if (waited == WaitResult::kInterrupted) return kContext;
  const Status how = waited == WaitResult::kReady
                         ? outcome->how
                         : Status(ErrorCode::kTimeout, "no card has reached it in time");
  if (how.ok()) return kGood;
  return fail(codeOf(how.code()), "segment \"" + name + "\" is not warm: " + how.error().message);
}

std::string TransferEngine::transportTo(const std::string& name) {
  const Call call(*this);
  const auto segment = call ? openSegment(name) : nullptr;
  if (!segment) return "";
  const auto peer = livePeer(*segment);
  if (!peer.ok()) {
    (void)fail(codeOf(peer.error().code), peer.error().message);
    return "";
  }
  return *peer ? (*peer)->channel->transportName() : "local";
}

Code TransferEngine::notify(const std::string& name, const Notification& notification) {
  const Call call(*this);
  if (!call) return kContext;
  Code code = kGood;
  const auto segment = openSegment(name, &code);
  if (!segment) return code;
  const auto peer = segment->peer(deadlineOf(0));
  if (!peer.ok()) return fail(codeOf(peer.error().code), peer.error().message);
  if (!*peer) {
    notifications_->keep(notification);
    return kGood;
  }
  const Status sent = notifications_->send(*peer, notification, deadlineOf(0));
  if (sent.ok()) return kGood;
  return fail(codeOf(sent.code()), "notification to \"" + name + "\": " + sent.error().message);
}

std::vector<Notification> TransferEngine::takeNotifications() {
  const Call call(*this);
  return call ? notifications_->take() : std::vector<Notification>();
}

}  // namespace mooncake::transfer
