#include "wires/cards/fabric_channel.h"

#include <algorithm>
#include <cstring>

#include "base/crypto.h"
#include "base/log.h"
#include "wires/cards/move_piece.h"
#include "wires/cards/read_piece_back.h"
#include "wires/cards/send_packet.h"
#include "wires/stream/wire.h"

namespace mooncake {
namespace {

// Number of RETIRE that wait for resume(). An honest peer sends a few for each region.
constexpr size_t kMostHeldRetires = 4096;

PacketStream::Options streamOptions(const Rails& rails, const FabricChannel::Options& options) {
  PacketStream::Options made{.name = options.name,
                             .pathNames = {},
                             .packetBytes = rails.packetBytes(),
                             .splitBytes = options.splitBytes,
                             .stallLimit = options.stallLimit};
  for (size_t i = 0; i < rails.count(); ++i) made.pathNames.push_back(rails.name(i));
  return made;
}

// Never 0.
uint64_t newIncarnation() {
  const Nonce nonce = Crypto::randomNonce();
  uint64_t number;
  std::memcpy(&number, nonce.data(), sizeof(number));
  return number == 0 ? 1 : number;
}

}  // namespace

FabricChannel::FabricChannel(const TransportContext& context, std::shared_ptr<Rails> rails,
                             std::shared_ptr<CardMemories> memories, const EngineId& peer,
                             Options options)
    : context_(context),
      rails_(std::move(rails)),
      memories_(std::move(memories)),
      peer_(peer),
      options_(std::move(options)),
      operations_(*rails_),
      breaks_(options_.breaks),
      stream_(streamOptions(*rails_, options_), context.regions, rails_->pool().buffers()),
      cards_(*rails_),
      keys_(options_.name, memories_, teller()),
      retirements_(teller()),
      mover_(options_.name, options_.leastByCard, parts(), teller()),
      fetches_(options_.leastByCard, options_.servedLimit, parts(), mover_, context.regions,
               teller()) {}

FabricChannel::~FabricChannel() { close(); }

control::Tell FabricChannel::teller() {
  return [this](const Bytes& message) REQUIRES(mutex_) { tell(message); };
}

CardMover::Parts FabricChannel::parts() {
  return {*rails_, memories_.get(), cards_, keys_, retirements_, stream_};
}

void FabricChannel::attach(std::shared_ptr<Channel> below) {
  Lock lock(mutex_);
  below_ = std::move(below);
  keys_.attach(weak_from_this());
  beginConnection();
  pump(Clock::now());
}

bool FabricChannel::isOver() const {
  Lock lock(mutex_);
  return life_.isClosed || life_.hasLeft;
}

size_t FabricChannel::unacknowledged() const {
  Lock lock(mutex_);
  return stream_.unacknowledged();
}

uint64_t FabricChannel::lifeSigns() const {
  return below_->lifeSigns() + received_.load(std::memory_order_relaxed);
}

// ---- requests

Status FabricChannel::put(const PutRequest& request) {
  if (request.data.size() > wire::kMaxPutBytes)
    return {ErrorCode::kInvalidArgument, "a put takes at most 64 MiB"};
  if (!wire::isSignalOffset(request.signal.offset))
    return {ErrorCode::kInvalidArgument, "a signal's word is 8-aligned and behind the doorbell"};
  Lock lock(mutex_);
  MOONCAKE_TRY(life_.usable());
  if (life_.isOut || life_.isFenced) return {};  // it would not land, or not count
  if (!stream_.hasRoomForPut(request.data.size()))
    return {ErrorCode::kExhausted, "256 MiB wait for a peer that does not read"};
  const uint64_t number = stream_.put(request);
  pump(Clock::now());
  stream_.copyUnsent(number);
  breakForTests();  // a part of it may have left
  return {};
}

// Returns whether a transfer can begin. Ends it at once if the peer has shut us out.
Status FabricChannel::begin(Completion* completion) const {
  MOONCAKE_TRY(life_.usable());
  if (life_.isFenced) return {ErrorCode::kAborted, "the peer is no longer part of the job"};
  if (stream_.transfers() + mover_.ours() >= wire::kMaxTransfers) {
    return {ErrorCode::kExhausted,
            std::to_string(wire::kMaxTransfers) + " transfers are under way on this connection"};
  }
  completion->begin();
  if (life_.isOut) completion->end(ErrorCode::kAborted);
  return {};
}

Status FabricChannel::get(std::span<const GetRequest> requests) {
  Lock lock(mutex_);
  const bool areFew = requests.size() < stream_.paths().count();
  for (const GetRequest& request : requests) {
    const PacketStream::Range there{request.region.key, request.offset};
    const Status begun = begin(request.completion);
    if (!begun.ok()) {
      if (&request == &requests.front()) return begun;
      request.completion->begin();
      request.completion->end(begun.code());
    } else if (!life_.isOut && !fetches_.ask(request) &&
               !mover_.begin({.isOneOfFew = areFew,
                              .there = there,
                              .memory = request.target,
                              .completion = request.completion})) {
      stream_.get(there, {.target = request.target, .completion = request.completion});
    }
  }
  fetches_.send();
  pump(Clock::now());
  activate();
  for (size_t i = 0; i < requests.size(); ++i) breakForTests();
  return {};
}

Status FabricChannel::write(const WriteRequest& request, const RemoteSignal& announcement) {
  const bool isAnnounced = announcement.region.key != 0;
  if (isAnnounced && !wire::isSignalOffset(announcement.signal.offset))
    return {ErrorCode::kInvalidArgument, "a signal's word is 8-aligned and behind the doorbell"};
  Lock lock(mutex_);
  MOONCAKE_TRY(begin(request.completion));
  if (life_.isOut) return {};
  const PacketStream::Range there{request.region.key, request.offset};
  // Cards only read the source. A peer waits for the announcement, so all cards share the write.
  const std::span source(const_cast<std::byte*>(request.source.data()), request.source.size());
  if (!mover_.begin({.isWrite = true,
                     .isOneOfFew = isAnnounced,
                     .there = there,
                     .memory = source,
                     .completion = request.completion,
                     .announcement = announcement}))
    stream_.write(there, request.source,
                  {.completion = request.completion, .announcement = announcement});
  pump(Clock::now());
  activate();
  breakForTests();
  return {};
}

Status FabricChannel::send(ByteView message) {
  if (message.empty() || message.size() > kMaxMessageBytes)
    return {ErrorCode::kInvalidArgument, "a message has 1 byte to 64 KiB"};
  {
    Lock lock(mutex_);
    MOONCAKE_TRY(life_.usable());
  }
  return messages_.send(*below_, message);
}

Status FabricChannel::carry(ByteView bytes) const {
  std::shared_ptr<Channel> below;
  {
    Lock lock(mutex_);
    below = below_;
  }
  if (!below) return {ErrorCode::kPeerLost, "the channel does not stand yet"};
  return below->send(control::withKind(control::Kind::kCarried, bytes));
}

void FabricChannel::warmUp(std::span<const RemoteRegion> regions, Deadline deadline,
                           std::function<void(Status)> done) {
  Lock lock(mutex_);
  const Status now = life_.usable();
  if (!now.ok()) return done(now);
  if (life_.isFenced) return done({ErrorCode::kAborted, "the peer is no longer part of the job"});
  std::vector<uint64_t> keys;
  for (const RemoteRegion& region : regions) {
    if (memories_) keys.push_back(region.key);
  }
  warmUp_.add(std::move(keys), deadline, std::move(done));
  if (stream_.isOpen()) askCold(Clock::now());
  pump(Clock::now());
  if (warmUp_.hasCallers()) activate();
}

// Asks for the keys that callers wait for, offers ours to the peer, and probes cold paths.
void FabricChannel::askCold(Clock::time_point now) {
  const auto isThere = [this](uint64_t region)
                           REQUIRES(mutex_) { return keys_.isAnswered(region); };
  if (!warmUp_.look(now, stream_.paths(), isThere)) return;
  if (!rails_->limits(0).closeEndsReads) keys_.offerAll();
  for (const size_t path : warmUp_.coldOnes(stream_.paths())) stream_.probe(path);
}

// ---- packets and pieces

void FabricChannel::activate() {
  if (isActive_ || life_.isClosed) return;
  isActive_ = true;
  rails_->activate(shared_from_this());
}

// Gives cards the packets and pieces that may leave now.
void FabricChannel::pump(Clock::time_point now) {
  if (!below_ || !stream_.isOpen() || life_.isClosed) return;
  const auto leave = [this](size_t path, const auto& packet) {
    mutex_.assertHeld();
    return submit(path, packet);
  };
  stream_.sendPlain(leave);
  if (life_.lost) return;
  mover_.readBack([this](CardPiece piece) {
    const size_t path = piece.path;
    rails_->submit(path, std::make_unique<ReadPieceBack>(shared_from_this(), std::move(piece)));
  });
  mover_.moveOn(now, [this](CardPiece piece) {
    const size_t path = piece.path;
    rails_->submit(path, std::make_unique<MovePiece>(shared_from_this(), std::move(piece)));
  });
  stream_.send(now, leave);
  if (stream_.isBusy() || mover_.isBusy()) activate();
}

// Returns false if the peer's card cannot be addressed.
bool FabricChannel::submit(size_t path, const std::shared_ptr<OutPacket>& packet) {
  const auto peer = cards_.at(path);
  if (!peer) return false;
  rails_->submit(path,
                 std::make_unique<SendPacket>(shared_from_this(), epoch_, packet, path, *peer));
  return true;
}

void FabricChannel::onSendFailed(size_t path, uint64_t epoch, const NicCompletion& how) {
  Lock lock(mutex_);
  if (life_.isClosed || life_.lost || life_.isFenced || !stream_.isOpen() || epoch != epoch_)
    return;
  const auto now = Clock::now();
  stream_.leaveOut(path, now,
                   how.error == NicError::kDevice ? "the card does not work"
                                                  : "the card could not reach the peer's");
  pump(now);
  activate();
}

void FabricChannel::onMoved(const CardPiece& piece, bool hasBegun, const NicCompletion& how) {
  Lock lock(mutex_);
  const auto now = Clock::now();
  if (mover_.onMoved(piece, hasBegun, how, now)) received_.fetch_add(1, std::memory_order_relaxed);
  pump(now);
}

void FabricChannel::onReadBack(size_t path, bool hasBegun, const NicCompletion& how) {
  Lock lock(mutex_);
  const auto now = Clock::now();
  mover_.onReadBack(path, hasBegun, how, now);
  pump(now);
}

void FabricChannel::onPacket(size_t rail, const Packet& packet, ByteView data) {
  Lock lock(mutex_);
  if (life_.isClosed || packet.incarnation != incarnation_) return;
  received_.fetch_add(Packet::kBytes + data.size(), std::memory_order_relaxed);
  const auto now = Clock::now();
  apply(stream_.receive(rail, packet, data, now), packet, data);
  pump(now);
}

// Deals with the effect of a packet that has arrived.
void FabricChannel::apply(PacketStream::Effect effect, const Packet& packet, ByteView data) {
  if (effect.answered) warmUp_.answered(*effect.answered);
  if (effect.isBack) endWait({});
  if (effect.isUnexpected && fetches_.awaitPackets(packet.number))
    effect = stream_.land(packet, data);
  if (!effect.end) return;
  // In tests the completion may be lost, though the data has come.
  if (effect.end->code == ErrorCode::kOk) breakForTests();
  finish(effect.end->transfer, effect.end->code);
}

bool FabricChannel::tick(Clock::time_point now) {
  Lock lock(mutex_);
  isActive_ = false;
  if (life_.isClosed || life_.lost || !stream_.isOpen()) return false;
  if (life_.isFenced && !onPath_) return false;  // no card has to reach the peer any more
  stream_.tick(now);
  if (warmUp_.hasCallers()) askCold(now);
  const Paths& paths = stream_.paths();
  const auto since = paths.allOutSince();
  if (!paths.stalled(now).empty() || (since && now - *since > options_.pathLimit)) ask(now);
  if (fetches_.isHeldUp(now)) {
    breakOff("it has not taken what it asked for");
    return false;
  }
  isActive_ = true;  // so that pump() does not call activate(): the return value says it
  pump(now);
  isActive_ = stream_.isBusy() || warmUp_.hasCallers() || mover_.isBusy() || fetches_.mayBeHeldUp();
  return isActive_;
}

void FabricChannel::onRenewed(size_t rail) {
  Lock lock(mutex_);
  if (life_.isClosed) return;
  keys_.forgetOffers();
  tell(control::Card{.index = static_cast<uint8_t>(rail), .address = rails_->address(rail)}
           .encode());
  if (!stream_.isOpen()) return;
  cards_.forget(rail);
  const auto now = Clock::now();
  stream_.leaveOut(rail, now, "it was opened anew", /*isAnew=*/true);
  pump(now);
}

void FabricChannel::onKeysChanged(uint64_t region) {
  Lock lock(mutex_);
  keys_.forgetOffer(region);
  if (!life_.isClosed) tell(control::encodeNumber(control::Kind::kChanged, region));
}

// ---- the end of transfers

void FabricChannel::finish(uint64_t transfer, ErrorCode code) {
  if (const auto part = stream_.finish(transfer, code)) mover_.onPartEnded(part->whole, part->code);
}

void FabricChannel::finishAll(ErrorCode code) {
  auto asked = mover_.giveUpAll(code, stream_.finishAll(code));
  if (asked.empty()) return;
  memories_->withdrawLater(this, [weak = weak_from_this(), asked = std::move(asked)] {
    const auto self = weak.lock();
    if (!self) return;  // closed, so the transfers have ended
    Lock lock(self->mutex_);
    for (const auto& transfer : asked) self->mover_.endAsked(transfer);
  });
}

void FabricChannel::cancel(const Completion* completion) {
  Lock lock(mutex_);
  stream_.cancel(completion);
  const auto taken = mover_.take(completion);
  lock.unlock();
  stop(taken);
  lock.lock();
  mover_.awaitTaken(mutex_, completion);
}

void FabricChannel::stop(const CardMover::Taken& taken) {
  if (taken.transfers.empty()) return;
  mover_.release(taken, this);
  Lock lock(mutex_);
  mover_.end(taken, ErrorCode::kAborted);
}

uint64_t FabricChannel::retire(const RemoteRegion& region) {
  Lock lock(mutex_);
  if (life_.isClosed || life_.isFenced || life_.isOut) return 0;
  const bool canAsk = stream_.isOpen() && !life_.lost;
  if (canAsk) keys_.withdraw(region.key);  // no later piece uses keys that the peer takes back
  return retirements_.begin(region.key, canAsk ? cards_.count() : 0, epoch_, stream_.lastSerial());
}

// A peer says HELLO on a new connection only after it has taken back all keys of the old one.
// Packets that the peer has acknowledged land before it answers RETIRE (onRetire()).
bool FabricChannel::isRetired(uint64_t number) {
  Lock lock(mutex_);
  const auto* call = retirements_.find(number);
  if (!call) return true;
  const bool isAnswered = call->tickets.empty() && !stream_.hasWritesUpTo(call->lastSerial);
  const bool isConnected = stream_.isOpen() && !life_.lost;
  if (!life_.isOut && !(isConnected && (call->epoch != epoch_ || isAnswered))) return false;
  retirements_.forget(number);
  return true;
}

// ---- the end of the peer, and of the channel

void FabricChannel::beginFence() {
  Lock lock(mutex_);
  if (std::exchange(life_.isFenced, true)) return;
  retirements_.forgetCalls();
  control::Fenced told{stream_.fence(Clock::now())};
  cards_.release();
  warmUp_.end({ErrorCode::kAborted, "the peer is no longer part of the job"});
  fencing_ = {.told = std::move(told), .taken = mover_.take(nullptr)};
  finishAll(ErrorCode::kAborted);
}

void FabricChannel::fence() {
  Lock once(fenceMutex_);
  beginFence();
  Lock lock(mutex_);
  auto begun = std::exchange(fencing_, std::nullopt);
  if (!begun) return;
  lock.unlock();
  if (memories_) memories_->takeBack(this);
  stop(begun->taken);
  lock.lock();
  tell(begun->told.encode());
}

// `isLeaving`: in peace, so that puts that may not have arrived go ahead of a goodbye.
void FabricChannel::end(bool isLeaving) {
  std::shared_ptr<Channel> below;
  CardMover::Taken taken;
  bool isFirst = false, hasLeft = false;
  {
    Lock lock(mutex_);
    below = below_;
    hasLeft = life_.hasLeft;
    if ((isFirst = !std::exchange(life_.isClosed, true))) {
      rails_->sinks().remove(incarnation_);
      retirements_.forgetCalls();
      taken = mover_.take(nullptr);
      finishAll(ErrorCode::kAborted);
      if (below && !life_.isOut && isLeaving) flushPuts();
      stream_.close();
      cards_.release();
      endWait({ErrorCode::kAborted, "the channel is closed"});
      warmUp_.end({ErrorCode::kAborted, "the channel is closed"});
    }
  }
  stop(taken);
  {
    Lock lock(mutex_);
    mover_.awaitTaken(mutex_, nullptr);
  }
  if (isFirst && memories_) {
    // A peer that has left in peace has nothing under way.
    if (hasLeft) {
      memories_->forget(this);
    } else {
      memories_->takeBack(this);
    }
  }
  if (below && isFirst) retireWrites(taken);
  if (below) isLeaving ? below->close() : below->abandon();
}

// Asks the peer, ahead of our goodbye, to let none of these writes land late.
void FabricChannel::retireWrites(const CardMover::Taken& taken) {
  Lock lock(mutex_);
  for (const auto& transfer : taken.transfers) {
    if (transfer->writes() && transfer->rails.load(std::memory_order_relaxed) != 0)
      retirements_.ask(transfer->key, transfer->grant->cards.size());
  }
}

void FabricChannel::flush() {
  Lock lock(mutex_);
  if (!life_.isClosed && !life_.lost && !life_.isOut && below_) flushPuts();
}

// Puts arrive over TCP, ahead of the goodbye. So do puts that wait because our connection has
// broken: after a goodbye it is not made again.
void FabricChannel::flushPuts() {
  stream_.flushPuts([this](ByteView bytes) {
    mutex_.assertHeld();
    tell(control::withKind(control::Kind::kPacket, bytes));
  });
}

// ---- breaks, and new connections

// Puts stay for close().
void FabricChannel::lose(const Error& why) {
  if (!life_.lost) life_.lost = why;
  stream_.breakOff();
  finishAll(ErrorCode::kPeerLost);
  warmUp_.end(*life_.lost);
}

void FabricChannel::breakOff(const std::string& why) {
  if (life_.lost) return;
  lose({ErrorCode::kPeerLost, why});
  context_.loop.post([weak = weak_from_this(), why] {
    if (const auto self = weak.lock()) self->tellOfBreak(why);
  });
}

void FabricChannel::tellOfBreak(const std::string& why) {
  if (isOver()) return;
  context_.onEnded(peer_, {Evidence::Kind::kUnreachable, why});
}

void FabricChannel::breakForTests() {
  if (breaks_.isDue([this] { return below_->lifeSigns(); }))
    breakOff("the simulated connection broke");
}

void FabricChannel::onEnded(const Evidence& evidence) {
  {
    Lock lock(mutex_);
    if (life_.isClosed) return;
    life_.hasLeft = life_.hasLeft || evidence.isGoodbye();
    const bool isKnown = life_.lost.has_value();
    lose({ErrorCode::kPeerLost, evidence.detail});
    endWait(*life_.lost);
    if (isKnown && !evidence.isGoodbye()) return;
  }
  context_.onEnded(peer_, evidence);
}

void FabricChannel::restart(Deadline deadline, std::function<void(Status)> onPath) {
  restart();
  Lock lock(mutex_);
  onPath_ = std::move(onPath);
  if (life_.isClosed) return endWait({ErrorCode::kAborted, "the channel is closed"});
  context_.loop.runAt(deadline, [weak = weak_from_this(), epoch = epoch_] {
    const auto self = weak.lock();
    if (!self) return;
    Lock lock(self->mutex_);
    if (self->epoch_ == epoch)
      self->endWait({ErrorCode::kPeerLost, "no card reaches the peer, which answers over tcp"});
  });
}

void FabricChannel::endWait(const Status& how) {
  if (!onPath_) return;
  if (!how.ok()) lose(how.error());
  context_.loop.post([onPath = std::exchange(onPath_, nullptr), how] { onPath(how); });
}

void FabricChannel::restart() {
  // Before the peer hears of the new connection, its keys are void and its writes land nowhere.
  if (memories_) memories_->takeBack(this);
  Lock lock(mutex_);
  if (life_.isClosed) return;
  endWait({ErrorCode::kPeerLost, "the connection was made anew"});
  ++epoch_;
  rails_->sinks().remove(incarnation_);
  finishAll(ErrorCode::kPeerLost);
  stream_.restart();
  keys_.forgetOffers();
  heldRetires_.clear();
  warmUp_.reset(0);
  warmUp_.end({ErrorCode::kPeerLost, "the connection was made anew"});
  cards_.release();
  messages_.clear();
  life_.lost.reset();
  breaks_.restart(Clock::now(), below_->lifeSigns());
  beginConnection();
}

// Takes packets with a new incarnation from now on, and says HELLO.
void FabricChannel::beginConnection() {
  incarnation_ = newIncarnation();
  rails_->sinks().add(incarnation_, weak_from_this());
  control::Hello hello{.incarnation = incarnation_,
                       .isFenced = life_.isFenced,
                       .packetBytes = static_cast<uint32_t>(rails_->packetBytes()),
                       .rails = {}};
  for (size_t i = 0; i < rails_->count(); ++i) {
    hello.rails.push_back(
        {.name = rails_->name(i), .provider = rails_->provider(), .address = rails_->address(i)});
  }
  tell(hello.encode());
}

void FabricChannel::resume() {
  std::vector<control::Retire> retires;
  {
    Lock lock(mutex_);
    retires = std::exchange(heldRetires_, {});
    const auto packets = stream_.release();
    if (life_.isClosed || life_.isFenced) return;
    for (const auto& [packet, data] : packets) apply(stream_.land(packet, data), packet, data);
    pump(Clock::now());
  }
  for (const control::Retire& retire : retires) onRetire(retire);
}

// ---- control messages

// If the connection has broken, onEnded() is called. Any other failure breaks it: a peer that does
// not read would wait for this message without end.
void FabricChannel::tell(const Bytes& message) {
  const Status sent = below_ ? below_->send(message) : Status();
  if (sent.ok() || sent.code() == ErrorCode::kPeerLost) return;
  context_.loop.post([weak = weak_from_this(), why = sent.error().message] {
    const auto self = weak.lock();
    if (!self) return;
    Lock lock(self->mutex_);
    if (!self->life_.isClosed) self->breakOff(why);
  });
}

void FabricChannel::onControl(control::Kind kind, ByteView bytes) {
  const Status read = control::receive(kind, bytes, *this);
  if (!read.ok()) log(LogLevel::kError, options_.name, read.error().message);
}

void FabricChannel::onMessage(ByteView message) {
  messages_.clear();
  context_.onMessage(peer_, message);
}

void FabricChannel::onMessageBegin(ByteView part) { messages_.begin(part); }

void FabricChannel::onMessageEnd(ByteView part) {
  const Bytes message = messages_.end(part);
  if (!message.empty()) context_.onMessage(peer_, message);
}

void FabricChannel::onHello(control::Hello hello) {
  Lock lock(mutex_);
  if (life_.isClosed || stream_.isOpen()) return;
  std::vector<Bytes> addresses;
  for (auto& rail : hello.rails) {
    if (rail.provider != rails_->provider() || rail.provider != hello.rails[0].provider)
      return breakOff("its cards are driven by provider " + rail.provider + ", ours by " +
                      rails_->provider());
    addresses.push_back(std::move(rail.address));
  }
  cards_.open(std::move(addresses));
  stream_.open(hello.incarnation, hello.packetBytes);
  warmUp_.reset(rails_->count());
  if (onPath_) stream_.awaitProbes(Clock::now());
  if (hello.isFenced) shutOut({});
  pump(Clock::now());
  activate();
}

void FabricChannel::onFenced(const control::Fenced& fenced) {
  Lock lock(mutex_);
  shutOut(fenced.written);
}

// We are out: nothing of ours lands any more, except for these writes, which have.
void FabricChannel::shutOut(const std::vector<uint64_t>& written) {
  life_.isOut = true;
  stream_.shutOut(Clock::now());
  for (const uint64_t number : written) finish(number, ErrorCode::kOk);
  finishAll(ErrorCode::kAborted);
}

void FabricChannel::onPacketMessage(const Packet& packet, ByteView data) {
  Lock lock(mutex_);
  const bool isForUs = packet.incarnation == incarnation_ || packet.incarnation == 0;
  if (!life_.isClosed && isForUs) stream_.receivePut(packet, data);
}

// Asks the peer which packets have come.
void FabricChannel::ask(Clock::time_point now) {
  if (now - askedAt_ < options_.stallLimit / 2) return;
  askedAt_ = now;
  tell(control::encodeNumber(control::Kind::kAsk, ++question_));
}

void FabricChannel::onAsk(uint64_t question) {
  Lock lock(mutex_);
  const Serials& come = stream_.serials();
  tell(control::State{question, come.below(), {come.above().begin(), come.above().end()}}.encode());
}

// The peer is alive, so packets that have not come by now are the fault of their path.
void FabricChannel::onState(const control::State& state) {
  Lock lock(mutex_);
  if (life_.isClosed || life_.lost || !stream_.isOpen() || state.question != question_) return;
  const auto now = Clock::now();
  stream_.acknowledge(state.below, state.above, now);
  for (const size_t path : stream_.paths().stalled(now))
    stream_.leaveOut(path, now, "nothing comes through");
  const auto since = stream_.paths().allOutSince();
  if (since && now - *since > options_.pathLimit && !onPath_)
    return breakOff("no card reaches the peer, which answers over tcp");
  pump(now);
}

void FabricChannel::onResolve(uint64_t region) {
  Lock lock(mutex_);
  if (!life_.isClosed && !life_.isFenced && !life_.lost) keys_.answer(region);
}

void FabricChannel::onChanged(uint64_t region) {
  Lock lock(mutex_);
  keys_.forget(region);
}

void FabricChannel::onGrant(control::Grant grant) {
  Lock lock(mutex_);
  if (!life_.isClosed && !life_.isFenced && stream_.isOpen()) keys_.onGrant(std::move(grant));
}

// A card of the peer has another address, and its keys are void.
void FabricChannel::onCard(const control::Card& card) {
  Lock lock(mutex_);
  if (!stream_.isOpen() || card.index >= cards_.count()) return;
  keys_.forgetAll();
  mover_.voidKeysOf(card.index);
  const auto now = Clock::now();
  for (const size_t path : cards_.move(card.index, card.address))
    stream_.leaveOut(path, now, "the peer's was opened anew", /*isAnew=*/true);
  pump(now);
}

void FabricChannel::onRetire(const control::Retire& retire) {
  uint64_t epoch = 0;
  {
    Lock lock(mutex_);
    if (life_.isClosed || life_.isFenced) return;
    // Held packets were acknowledged, and land at resume(). The answer comes after them.
    if (stream_.isHeld()) {
      if (heldRetires_.size() < kMostHeldRetires) heldRetires_.push_back(retire);
      return;
    }
    if (!memories_) return tell(control::encodeNumber(control::Kind::kRetired, retire.ticket));
    epoch = epoch_;
  }
  memories_->takeBackLater(retire.region, retire.card, this,
                           [weak = weak_from_this(), ticket = retire.ticket, epoch] {
                             const auto self = weak.lock();
                             if (!self) return;
                             Lock lock(self->mutex_);
                             if (self->epoch_ == epoch && !self->life_.isClosed)
                               self->tell(control::encodeNumber(control::Kind::kRetired, ticket));
                           });
}

void FabricChannel::onRetired(uint64_t ticket) {
  Lock lock(mutex_);
  mover_.onRetired(ticket);
  pump(Clock::now());
  activate();
}

void FabricChannel::onFetch(const control::Fetch& fetch) {
  Lock lock(mutex_);
  if (life_.isClosed || life_.isFenced || life_.lost) return;
  fetches_.onFetch(fetch);
  pump(Clock::now());
  activate();
}

void FabricChannel::onFetched(const control::Fetched& fetched) {
  Lock lock(mutex_);
  breakForTests();  // in tests the completion may be lost, though the data has come
  fetches_.onFetched(fetched);
  pump(Clock::now());
  activate();
}

}  // namespace mooncake
