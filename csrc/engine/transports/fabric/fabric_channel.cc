#include "engine/transports/fabric/fabric_channel.h"

#include <algorithm>
#include <cstring>

#include "base/crypto.h"
#include "base/log.h"
#include "engine/stream/wire.h"

// What is asked, and what the peer's end says. What becomes of packets: fabric_packets.cc, of what
// cards move by themselves: fabric_cards.cc, and for each other: fabric_fetches.cc; how things end:
// fabric_ends.cc.
namespace mooncake {
namespace {

PacketStream::Options streamOptions(const Rails& rails, const FabricChannel::Options& options) {
  PacketStream::Options made{.name = options.name,
                             .pathNames = {},
                             .packetBytes = rails.packetBytes(),
                             .splitBytes = options.splitBytes,
                             .stallLimit = options.stallLimit};
  for (size_t i = 0; i < rails.count(); ++i) made.pathNames.push_back(rails.name(i));
  return made;
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
      stream_(streamOptions(*rails_, options_), context.regions, rails_->pool().buffers()),
      movingOn_(rails_->count()) {}

FabricChannel::~FabricChannel() { close(); }

void FabricChannel::attach(std::shared_ptr<Channel> below) {
  std::lock_guard lock(mutex_);
  below_ = std::move(below);
  incarnation_ = newIncarnation();
  rails_->sinks().add(incarnation_, weak_from_this());
  sayHello();
  pump(Clock::now());
}

bool FabricChannel::isOver() const {
  std::lock_guard lock(mutex_);
  return closed_ || hasLeft_;
}

size_t FabricChannel::unacknowledged() const {
  std::lock_guard lock(mutex_);
  return stream_.unacknowledged();
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
  if (isOut_ || fenced_) return {};  // Nothing of it would land, or count.
  if (!stream_.hasRoomForPut(request.data.size()))
    return {ErrorCode::kExhausted, "256 MiB wait for a peer that does not read"};
  const uint64_t number = stream_.put(request);
  pump(Clock::now());
  stream_.copyUnsent(number);
  perhapsBreak();  // half of it may have left
  return {};
}

// Whether a transfer can begin; ended at once where the peer has shut us out.
Status FabricChannel::begin(Completion* completion) const {
  MOONCAKE_TRY(usable());
  if (fenced_) return {ErrorCode::kAborted, "the peer is no longer part of the job"};
  if (stream_.transfers() + moving_.size() - serving_ >= wire::kMaxTransfers) {
    return {ErrorCode::kExhausted,
            std::to_string(wire::kMaxTransfers) + " transfers are under way on this connection"};
  }
  completion->begin();
  if (isOut_) completion->end(ErrorCode::kAborted);
  return {};
}

Status FabricChannel::get(std::span<const GetRequest> requests) {
  std::lock_guard lock(mutex_);
  control::Fetch asked;
  for (const GetRequest& request : requests) {
    const Status begun = begin(request.completion);
    if (!begun.ok()) {
      if (&request == &requests.front()) return begun;
      request.completion->begin();
      request.completion->end(begun.code());
    } else if (!isOut_ && !askForWrite(request, asked)) {
      beginGet(request, requests.size() < stream_.paths().count());
    }
  }
  sendFetch(asked);
  pump(Clock::now());
  activate();
  for (size_t i = 0; i < requests.size(); ++i) perhapsBreak();
  return {};
}

void FabricChannel::beginGet(const GetRequest& request, bool isOneOfFew) {
  if (moveByCards(/*isWrite=*/false, isOneOfFew, request.region, request.offset, request.target,
                  request.completion))
    return;
  stream_.get({request.region.key, request.offset},
              {.target = request.target, .completion = request.completion});
}

Status FabricChannel::write(const WriteRequest& request, const RemoteSignal& announcement) {
  const bool isAnnounced = announcement.region.key != 0;
  if (isAnnounced && !wire::isSignalOffset(announcement.signal.offset))
    return {ErrorCode::kInvalidArgument, "a signal's word is 8-aligned and behind the doorbell"};
  std::lock_guard lock(mutex_);
  MOONCAKE_TRY(begin(request.completion));
  if (isOut_) return {};
  // Cards only read it.
  const std::span source(const_cast<std::byte*>(request.source.data()), request.source.size());
  // Somebody waits for what is announced, so all cards hurry.
  if (const auto moving = moveByCards(/*isWrite=*/true, /*isOneOfFew=*/isAnnounced, request.region,
                                      request.offset, source, request.completion)) {
    moving->announcement = announcement;
  } else {
    stream_.write({request.region.key, request.offset}, request.source,
                  {.completion = request.completion, .announcement = announcement});
  }
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

void FabricChannel::warmUp(std::span<const RemoteRegion> regions, Deadline deadline,
                           std::function<void(Status)> done) {
  std::lock_guard lock(mutex_);
  const Status now = usable();
  if (!now.ok()) return done(now);
  if (fenced_) return done({ErrorCode::kAborted, "the peer is no longer part of the job"});
  std::vector<uint64_t> keys;
  for (const RemoteRegion& region : regions) {
    if (memories_) keys.push_back(region.key);
  }
  warmUp_.add(std::move(keys), deadline, std::move(done));
  if (theirs_) askCold(Clock::now());
  pump(Clock::now());
  if (warmUp_.hasCallers()) activate();
}

// Also asks for the keys that callers wait for, and tells the peer ours.
void FabricChannel::askCold(Clock::time_point now) {
  const auto isThere = [&](uint64_t key) {
    (void)grantOf(key);
    return grants_[key].isAnswered;
  };
  if (!warmUp_.look(now, stream_.paths(), isThere)) return;
  if (memories_ && !rails_->limits(0).closeEndsReads) {
    for (const uint64_t key : memories_->keys(control::kMostOffers)) offer(key);
  }
  for (const size_t path : warmUp_.coldOnes(stream_.paths())) stream_.probe(path);
}

// ---- what the peer's end says

void FabricChannel::tell(const Bytes& bytes) {
  // Where the connection has broken we are told. Else the peer does not read, and would wait for
  // what it never hears: better that the connection breaks.
  const Status sent = below_ ? below_->send(bytes) : Status();
  if (sent.ok() || sent.code() == ErrorCode::kPeerLost) return;
  context_.loop.post([weak = weak_from_this(), why = sent.error().message] {
    const auto self = weak.lock();
    if (!self) return;
    std::lock_guard lock(self->mutex_);
    if (!self->closed_) self->breakOff(why);
  });
}

void FabricChannel::sayHello() {
  control::Hello hello{.incarnation = incarnation_,
                       .isFenced = fenced_,
                       .packetBytes = static_cast<uint32_t>(rails_->packetBytes()),
                       .rails = {}};
  for (size_t i = 0; i < rails_->count(); ++i) {
    hello.rails.push_back(
        {.name = rails_->name(i), .provider = rails_->provider(), .address = rails_->address(i)});
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
      if (!closed_ && isForUs) stream_.receivePut(*packet, in.getRaw(in.left()));
      return;
    }
    case Kind::kAsk:
      if (const auto question = control::decodeNumber(bytes); isRead(question)) {
        std::lock_guard lock(mutex_);
        const Serials& come = stream_.serials();
        tell(control::State{*question, come.below(), {come.above().begin(), come.above().end()}}
                 .encode());
      }
      return;
    case Kind::kState:
      if (const auto state = control::State::decode(bytes); isRead(state)) onState(*state);
      return;
    case Kind::kResolve:
      if (const auto key = control::decodeNumber(bytes); isRead(key)) onResolve(*key);
      return;
    case Kind::kGrant:
      if (auto grant = control::Grant::decode(bytes); isRead(grant)) onGrant(std::move(*grant));
      return;
    case Kind::kChanged:
      if (const auto key = control::decodeNumber(bytes); isRead(key)) onChanged(*key);
      return;
    case Kind::kCard:
      if (const auto card = control::Card::decode(bytes); isRead(card)) onCard(*card);
      return;
    case Kind::kRetire:
      if (const auto retire = control::Retire::decode(bytes); isRead(retire)) onRetire(*retire);
      return;
    case Kind::kRetired:
      if (const auto ticket = control::decodeNumber(bytes); isRead(ticket)) onRetired(*ticket);
      return;
    case Kind::kFetch:
      if (const auto fetch = control::Fetch::decode(bytes); isRead(fetch)) onFetch(*fetch);
      return;
    case Kind::kFetched:
      if (const auto fetched = control::Fetched::decode(bytes); isRead(fetched))
        onFetched(*fetched);
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
    if (rail.provider == hello.rails[0].provider && rail.provider == rails_->provider()) continue;
    return breakOff("its cards are driven by provider " + rail.provider + ", ours by " +
                    rails_->provider());
  }
  theirs_ = std::move(hello);
  stream_.open(theirs_->incarnation, theirs_->packetBytes);
  peers_.assign(rails_->count(), std::nullopt);
  warmUp_.reset(rails_->count());
  if (onPath_) stream_.awaitProbes(Clock::now());
  if (theirs_->isFenced) {
    isOut_ = true;
    stream_.shutOut(Clock::now());
    finishAll(ErrorCode::kAborted);
  }
  pump(Clock::now());
  activate();
}

void FabricChannel::onFenced(const control::Fenced& fenced) {
  std::lock_guard lock(mutex_);
  isOut_ = true;
  stream_.shutOut(Clock::now());
  for (const uint64_t written : fenced.written) finish(written, ErrorCode::kOk);
  finishAll(ErrorCode::kAborted);
}

void FabricChannel::ask(Clock::time_point now) {
  if (now - askedAt_ < options_.stallLimit / 2) return;
  askedAt_ = now;
  tell(control::encodeNumber(control::Kind::kAsk, ++question_));
}

// The peer lives: what has not come by now is the path's fault.
void FabricChannel::onState(const control::State& state) {
  std::lock_guard lock(mutex_);
  if (closed_ || lost_ || !theirs_ || state.question != question_) return;
  const auto now = Clock::now();
  stream_.acknowledge(state.below, state.above, now);
  for (const size_t path : stream_.paths().stalled(now))
    stream_.leaveOut(path, now, "nothing comes through");
  const auto since = stream_.paths().allOutSince();
  if (since && now - *since > options_.pathLimit && !onPath_)
    return breakOff("no card reaches the peer, which answers over tcp");
  pump(now);
}

}  // namespace mooncake
