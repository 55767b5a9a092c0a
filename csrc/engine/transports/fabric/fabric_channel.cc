#include "engine/transports/fabric/fabric_channel.h"

#include <algorithm>
#include <cstring>

#include "base/crypto.h"
#include "base/log.h"
#include "engine/stream/wire.h"

// The contract, and how things end. What becomes of packets: fabric_packets.cc.
namespace mooncake {
namespace {

// As TCP has it.
constexpr size_t kMostQueuedBytes = size_t(256) << 20;
// From one break that a test asks for to the next. Far less than a failure timeout, and time enough
// for some work.
constexpr auto kLeastStanding = std::chrono::milliseconds(50);
// Until a card that has not answered is asked once more.
constexpr auto kColdPause = std::chrono::milliseconds(100);
constexpr size_t kMostWords = 4096;  // whose last put is remembered, before those that landed go

uint64_t randomNumber() {
  const Nonce nonce = Crypto::randomNonce();
  uint64_t number;
  std::memcpy(&number, nonce.data(), sizeof(number));
  return number == 0 ? 1 : number;
}

}  // namespace

FabricChannel::FabricChannel(const TransportContext& context, std::shared_ptr<Rails> rails,
                             const EngineId& peer, Options options)
    : context_(context),
      rails_(std::move(rails)),
      peer_(peer),
      options_(std::move(options)),
      paths_(options_.stallLimit),
      incoming_(context.regions) {}

FabricChannel::~FabricChannel() { close(); }

void FabricChannel::attach(std::shared_ptr<Channel> below) {
  std::lock_guard lock(mutex_);
  below_ = std::move(below);
  incarnation_ = randomNumber();
  rails_->add(incarnation_, weak_from_this());
  sayHello();
  pump(Clock::now());
}

bool FabricChannel::isOver() const {
  std::lock_guard lock(mutex_);
  return closed_ || hasLeft_;
}

uint64_t FabricChannel::lifeSigns() const {
  return below_->lifeSigns() + received_.load(std::memory_order_relaxed);
}

Status FabricChannel::usable() const {
  if (lost_) return *lost_;  // also when it is closed since
  return closed_ ? Status(ErrorCode::kAborted, "the channel is closed") : Status();
}

// ---- what is asked

Status FabricChannel::put(const PutRequest& request) {
  if (request.data.size() > wire::kMaxPutBytes)
    return {ErrorCode::kInvalidArgument, "a put takes at most 64 MiB"};
  if (!wire::isSignalOffset(request.signal.offset))
    return {ErrorCode::kInvalidArgument, "a signal's word is 8-aligned and behind the doorbell"};
  std::lock_guard lock(mutex_);
  MOONCAKE_TRY(usable());
  if (isOut_) return {};  // nothing of it would land
  if (queuedBytes_ > 0 && queuedBytes_ + request.data.size() > kMostQueuedBytes)
    return {ErrorCode::kExhausted, "256 MiB wait for a peer that does not read"};
  const uint64_t number = ++lastPut_;
  if (lastPuts_.size() >= kMostWords) forgetLandedPuts();
  uint64_t& last = lastPuts_[{request.region.key, request.signal.offset}];
  puts_.push_back({.packet = {.kind = Packet::Kind::kPut,
                              .number = number,
                              .key = request.region.key,
                              .offset = request.offset,
                              .length = request.data.size(),
                              .signal = request.signal,
                              .after = std::exchange(last, number)},
                   .data = request.data,
                   .turn = turn_++});
  pump(Clock::now());
  if (!puts_.empty() && puts_.back().packet.number == number) {
    // What has not left is copied: the caller's memory is his again.
    Stream& rest = puts_.back();
    const auto left = rest.data.subspan(rest.packet.position);
    rest.owned.assign(left.begin(), left.end());
    rest.ownedFrom = rest.packet.position;
    rest.data = {};
    queuedBytes_ += rest.owned.size();
    activate();
  }
  perhapsBreak();  // half of it may have left
  return {};
}

// Under the lock. Of the puts whose words we remember, those that have landed.
void FabricChannel::forgetLandedPuts() {
  uint64_t first = puts_.empty() ? lastPut_ : puts_.front().packet.number;
  for (const auto& [serial, sent] : unacked_) {
    if (sent.kind == Packet::Kind::kPut) {
      first = std::min(first, sent.number);
      break;
    }
  }
  std::erase_if(lastPuts_, [&](const auto& entry) { return entry.second < first; });
}

// Whether a transfer can begin; ended at once where the peer has shut us out.
Status FabricChannel::begin(Completion* completion) const {
  MOONCAKE_TRY(usable());
  if (fenced_) return {ErrorCode::kAborted, "the peer is no longer part of the job"};
  if (transfers_.size() >= wire::kMaxTransfers) {
    return {ErrorCode::kExhausted,
            std::to_string(wire::kMaxTransfers) + " transfers are under way on this connection"};
  }
  completion->begin();
  if (isOut_) completion->end(ErrorCode::kAborted);
  return {};
}

Status FabricChannel::get(const GetRequest& request) {
  std::lock_guard lock(mutex_);
  MOONCAKE_TRY(begin(request.completion));
  if (isOut_) return {};
  const uint64_t number = ++lastNumber_;
  transfers_.emplace(number, Transfer{.target = request.target, .completion = request.completion});
  bulk_.push_front({.packet = {.kind = Packet::Kind::kGet,
                               .number = number,
                               .key = request.region.key,
                               .offset = request.offset,
                               .length = request.target.size()},
                    .turn = turn_++});
  pump(Clock::now());
  activate();
  perhapsBreak();
  return {};
}

Status FabricChannel::write(const WriteRequest& request) {
  std::lock_guard lock(mutex_);
  MOONCAKE_TRY(begin(request.completion));
  if (isOut_) return {};
  const uint64_t number = ++lastNumber_;
  transfers_.emplace(number, Transfer{.completion = request.completion});
  bulk_.push_back({.packet = {.kind = Packet::Kind::kWrite,
                              .number = number,
                              .key = request.region.key,
                              .offset = request.offset,
                              .length = request.source.size()},
                   .data = request.source,
                   .completion = request.completion,
                   .turn = turn_++});
  pump(Clock::now());
  activate();
  perhapsBreak();
  return {};
}

Status FabricChannel::send(ByteView message) {
  if (message.empty() || message.size() > kMaxMessageBytes)
    return {ErrorCode::kInvalidArgument, "a message has 1 byte to 64 KiB"};
  {
    std::lock_guard lock(mutex_);
    MOONCAKE_TRY(usable());
  }
  using control::Kind, control::withKind;
  constexpr size_t kMost = kMaxMessageBytes - 1;
  std::lock_guard lock(sendMutex_);
  if (message.size() <= kMost) return below_->send(withKind(Kind::kMessage, message));
  // Where the second one is not taken, the first one counts for nothing over there.
  MOONCAKE_TRY(below_->send(withKind(Kind::kBegin, message.first(kMost))));
  return below_->send(withKind(Kind::kEnd, message.subspan(kMost)));
}

Status FabricChannel::carry(ByteView bytes) const {
  std::shared_ptr<Channel> below;
  {
    std::lock_guard lock(mutex_);
    below = below_;
  }
  if (!below) return {ErrorCode::kPeerLost, "the channel does not stand yet"};
  return below->send(control::withKind(control::Kind::kCarried, bytes));
}

void FabricChannel::warmUp(Deadline deadline, std::function<void(Status)> done) {
  std::lock_guard lock(mutex_);
  const Status now = usable();
  if (!now.ok()) return done(now);
  warming_.push_back({deadline, std::move(done)});
  if (theirs_) askCold(Clock::now());
  if (!warming_.empty()) activate();
}

// Over each path that is up and has answered nothing yet; what is lost is asked again. Those that
// are left out are probed anyway.
void FabricChannel::askCold(Clock::time_point now) {
  bool isAnyWarm = false, isAnyCold = false;
  for (size_t i = 0; i < isWarm_.size(); ++i) {
    isAnyWarm = isAnyWarm || isWarm_[i];
    isAnyCold = isAnyCold || (!isWarm_[i] && paths_.isUp(i));
  }
  if (isAnyWarm && !isAnyCold) return endWarmUp({});
  std::erase_if(warming_, [&](const WarmUp& one) {
    const bool isLate = now >= one.deadline.when();
    if (isLate) one.done({ErrorCode::kTimeout, "not every card has reached it in time"});
    return isLate;
  });
  if (now < askColdAt_) return;
  askColdAt_ = now + kColdPause;
  for (size_t i = 0; i < isWarm_.size(); ++i) {
    if (!isWarm_[i] && paths_.isUp(i))
      sendPlain({.kind = Packet::Kind::kProbe, .number = paths_.probe(i)}, i);
  }
}

void FabricChannel::endWarmUp(const Status& how) {
  for (const WarmUp& one : std::exchange(warming_, {})) one.done(how);
}

// ---- what the peer's end says

void FabricChannel::tell(const Bytes& bytes) {
  // Where the connection has broken we are told.
  if (below_) (void)below_->send(bytes);
}

void FabricChannel::sayHello() {
  control::Hello hello{.incarnation = incarnation_,
                       .isFenced = fenced_,
                       .packetBytes = static_cast<uint32_t>(rails_->packetBytes()),
                       .rails = {}};
  for (size_t i = 0; i < rails_->count(); ++i) {
    const Nic& nic = rails_->nic(i);
    hello.rails.push_back(
        {.name = nic.name(), .provider = nic.provider(), .address = nic.address()});
  }
  tell(hello.encode());
}

void FabricChannel::onControl(control::Kind kind, ByteView bytes) {
  using control::Kind;
  const auto isRead = [this](const auto& message) {
    if (!message.ok()) log(LogLevel::kError, options_.name, message.error().message);
    return message.ok();
  };
  switch (kind) {
    case Kind::kMessage:
      arriving_.clear();
      return context_.onMessage(peer_, bytes);
    case Kind::kBegin:
      arriving_.assign(bytes.begin(), bytes.end());
      return;
    case Kind::kEnd: {
      if (arriving_.empty()) return;
      Bytes message = std::exchange(arriving_, {});
      message.insert(message.end(), bytes.begin(), bytes.end());
      return context_.onMessage(peer_, message);
    }
    case Kind::kHello:
      if (auto hello = control::Hello::decode(bytes); isRead(hello)) onHello(std::move(*hello));
      return;
    case Kind::kFenced:
      if (const auto fenced = control::Fenced::decode(bytes); isRead(fenced)) onFenced(*fenced);
      return;
    case Kind::kPacket: {
      ByteReader in(bytes);
      const auto packet = Packet::decode(in);
      if (!isRead(packet)) return;
      std::lock_guard lock(mutex_);
      const bool isForUs = packet->incarnation == incarnation_ || packet->incarnation == 0;
      if (closed_ || fenced_ || !isForUs || packet->kind != Packet::Kind::kPut) return;
      if (serials_.add(packet->serial)) land(*packet, in.getRaw(in.left()));
      return;
    }
    case Kind::kAsk:
      if (const auto question = control::decodeAsk(bytes); isRead(question)) {
        std::lock_guard lock(mutex_);
        const auto& above = serials_.above();
        tell(control::State{*question, serials_.below(), {above.begin(), above.end()}}.encode());
      }
      return;
    case Kind::kState:
      if (const auto state = control::State::decode(bytes); isRead(state)) onState(*state);
      return;
    case Kind::kCarried:
      return;
  }
  log(LogLevel::kError, options_.name, "a control message does not decode");
}

void FabricChannel::onHello(control::Hello hello) {
  std::lock_guard lock(mutex_);
  if (closed_ || theirs_) return;
  for (const auto& rail : hello.rails) {
    if (rail.provider == hello.rails[0].provider && rail.provider == rails_->nic(0).provider())
      continue;
    return breakOff("its cards are driven by provider " + rail.provider + ", ours by " +
                    rails_->nic(0).provider());
  }
  theirs_ = std::move(hello);
  paths_.reset(rails_->count());
  peers_.assign(rails_->count(), std::nullopt);
  isWarm_.assign(rails_->count(), false);
  askColdAt_ = {};
  if (onPath_) {
    // The first that answers a probe is the first that is up.
    for (size_t i = 0; i < paths_.count(); ++i) paths_.leaveOut(i, Clock::now());
  }
  if (theirs_->isFenced) {
    isOut_ = true;
    dropBulk();
    dropSent();
    finishAll(ErrorCode::kAborted);
  }
  pump(Clock::now());
  activate();
}

void FabricChannel::onFenced(const control::Fenced& fenced) {
  std::lock_guard lock(mutex_);
  isOut_ = true;
  for (const uint64_t written : fenced.written) finish(written, ErrorCode::kOk);
  dropBulk();
  dropSent();
  finishAll(ErrorCode::kAborted);
}

void FabricChannel::ask(Clock::time_point now) {
  if (now - askedAt_ < options_.stallLimit / 2) return;
  askedAt_ = now;
  tell(control::encodeAsk(++question_));
}

// The peer lives: what has not come by now is the path's fault.
void FabricChannel::onState(const control::State& state) {
  std::lock_guard lock(mutex_);
  if (closed_ || lost_ || !theirs_ || state.question != question_) return;
  const auto now = Clock::now();
  acknowledge(state.below, state.above, now);
  for (const size_t path : paths_.stalled(now)) leaveOut(path, now, "nothing comes through");
  const auto since = paths_.allOutSince();
  if (since && now - *since > options_.pathLimit && !onPath_)
    return breakOff("no card reaches the peer, which answers over tcp");
  pump(now);
}

// ---- how things end

void FabricChannel::finish(uint64_t transfer, ErrorCode code) {
  if (const auto found = transfers_.extract(transfer)) found.mapped().completion->end(code);
}

void FabricChannel::finishAll(ErrorCode code) {
  for (const auto& [number, transfer] : transfers_) transfer.completion->end(code);
  transfers_.clear();
}

// Sources are not read, nor is the peer answered, any more.
void FabricChannel::dropBulk() {
  bulk_.clear();
  answering_ = 0;
}

// None of it would land, and nobody acknowledges it.
void FabricChannel::dropSent() {
  const auto now = Clock::now();
  while (!unacked_.empty()) erase(unacked_.begin(), now);
  puts_.clear();
  queuedBytes_ = 0;
}

void FabricChannel::cancel(const Completion* completion) {
  std::lock_guard lock(mutex_);
  std::erase_if(bulk_, [&](Stream& stream) {
    if (stream.completion != completion) return false;
    if (stream.pieces == 0) return true;
    // The peer is told that no more comes.
    stream.packet.status = Packet::Status::kAborted;
    stream.data = {};
    stream.completion = nullptr;
    return false;
  });
  std::erase_if(transfers_, [&](const auto& entry) {
    const bool counts = entry.second.completion == completion;
    if (counts) entry.second.completion->end(ErrorCode::kAborted);
    return counts;
  });
}

void FabricChannel::fence() {
  std::lock_guard lock(mutex_);
  if (std::exchange(fenced_, true)) return;
  incoming_.clear();
  control::Fenced fenced;
  for (const auto& [serial, sent] : unacked_) {
    if (sent.kind == Packet::Kind::kWritten && sent.status == Packet::Status::kOk)
      fenced.written.push_back(sent.number);
  }
  for (const Stream& stream : bulk_) {
    if (stream.packet.kind == Packet::Kind::kWritten && stream.packet.status == Packet::Status::kOk)
      fenced.written.push_back(stream.packet.number);
  }
  dropBulk();
  finishAll(ErrorCode::kAborted);
  tell(fenced.encode());
}

void FabricChannel::close() {
  std::shared_ptr<Channel> below;
  {
    std::lock_guard lock(mutex_);
    below = below_;
    if (!std::exchange(closed_, true)) {
      rails_->remove(incarnation_);
      dropBulk();
      finishAll(ErrorCode::kAborted);
      if (below && !isOut_) flushPuts();
      puts_.clear();
      unacked_.clear();
      releasePeers();
      endWait({ErrorCode::kAborted, "the channel is closed"});
      endWarmUp({ErrorCode::kAborted, "the channel is closed"});
    }
  }
  if (below) below->close();
}

// What was put still arrives, ahead of the goodbye, also what a break of ours holds: one that
// catches a goodbye is not cured.
void FabricChannel::flushPuts() {
  for (const auto& [serial, sent] : unacked_) {
    if (sent.kind == Packet::Kind::kPut)
      tell(control::withKind(control::Kind::kPacket, sent.packet->bytes()));
  }
  Bytes bytes;
  for (; !puts_.empty(); puts_.pop_front()) {
    for (bool isLast = false; !isLast;) {
      bytes.resize(packetBytes());
      const size_t length = fill(puts_.front(), bytes, ++lastSerial_, isLast);
      tell(control::withKind(control::Kind::kPacket, ByteView(bytes).first(length)));
    }
  }
}

void FabricChannel::releasePeers() {
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (peers_[i]) rails_->release(i, *peers_[i]);
  }
  peers_.assign(peers_.size(), std::nullopt);
}

// Puts stay for close().
void FabricChannel::lose(const Error& why) {
  if (!lost_) lost_ = why;
  dropBulk();
  finishAll(ErrorCode::kPeerLost);
  endWarmUp(*lost_);
}

void FabricChannel::breakOff(const std::string& why) {
  if (lost_) return;
  lose({ErrorCode::kPeerLost, why});
  context_.loop.post([weak = weak_from_this(), why] {
    if (const auto self = weak.lock()) self->tellOfBreak(why);
  });
}

void FabricChannel::tellOfBreak(const std::string& why) {
  if (isOver()) return;
  context_.onEnded(peer_, {Evidence::Kind::kUnreachable, why});
}

// Not before the last break is over for the engine: it must have heard of the peer.
void FabricChannel::perhapsBreak() {
  if (!options_.breaks || !options_.breaks()) return;
  if (lost_ || Clock::now() < standsUntil_ || below_->lifeSigns() == heard_) return;
  breakOff("the simulated connection broke");
}

void FabricChannel::onEnded(const Evidence& evidence) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    hasLeft_ = hasLeft_ || evidence.isGoodbye();
    const bool isKnown = lost_.has_value();
    lose({ErrorCode::kPeerLost, evidence.detail});
    endWait(*lost_);
    if (isKnown && !evidence.isGoodbye()) return;
  }
  context_.onEnded(peer_, evidence);
}

// A connection of which no card reaches the peer would break again at once: whoever makes it waits
// until one does, and may give up.
void FabricChannel::restart(Deadline deadline, std::function<void(Status)> onPath) {
  restart();
  std::lock_guard lock(mutex_);
  onPath_ = std::move(onPath);
  if (closed_) return endWait({ErrorCode::kAborted, "the channel is closed"});
  context_.loop.runAt(deadline, [weak = weak_from_this(), epoch = epoch_] {
    const auto self = weak.lock();
    if (!self) return;
    std::lock_guard lock(self->mutex_);
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
  std::lock_guard lock(mutex_);
  if (closed_) return;
  endWait({ErrorCode::kPeerLost, "the connection was made anew"});
  ++epoch_;
  rails_->remove(incarnation_);
  finishAll(ErrorCode::kPeerLost);
  dropBulk();
  puts_.clear();
  queuedBytes_ = 0;
  unacked_.clear();
  waiting_ = 0;
  lastPuts_.clear();
  lastPut_ = lastSerial_ = 0;
  serials_ = {};
  incoming_.clear();
  ackOwed_ = 0;
  theirs_.reset();
  isWarm_.clear();
  endWarmUp({ErrorCode::kPeerLost, "the connection was made anew"});
  releasePeers();
  arriving_.clear();
  lost_.reset();
  standsUntil_ = Clock::now() + kLeastStanding;
  heard_ = below_->lifeSigns();
  incarnation_ = randomNumber();
  rails_->add(incarnation_, weak_from_this());
  sayHello();
}

}  // namespace mooncake
