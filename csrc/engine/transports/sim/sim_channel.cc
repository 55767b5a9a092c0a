#include "engine/transports/sim/sim_channel.h"

#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "engine/stream/wire.h"

namespace mooncake {
namespace {

constexpr size_t kMostData = Channel::kMaxMessageBytes - SimPacket::kBytes;
static_assert(SimDice::kMostPiece <= kMostData);
// What leaves in one go, before others have their turn.
constexpr size_t kMostAtOnce = size_t(1) << 20;
// The wire below takes nothing more at the moment.
constexpr auto kPause = std::chrono::milliseconds(1);
// From one break to the next. Far less than a failure timeout, and time enough for some work.
constexpr auto kLeastStanding = std::chrono::milliseconds(50);

std::atomic<uint64_t>& wordAt(const RegionTable::Use& use) {
  return *reinterpret_cast<std::atomic<uint64_t>*>(use.data());
}

}  // namespace

void SimChannel::attach(std::shared_ptr<Channel> below) {
  std::lock_guard lock(mutex_);
  below_ = std::move(below);
  release();
}

bool SimChannel::isOver() const {
  std::lock_guard lock(mutex_);
  return closed_ || hasLeft_;
}

Status SimChannel::usable() const {
  if (lost_) return *lost_;  // also when it is closed since
  return closed_ ? Status(ErrorCode::kAborted, "the channel is closed") : Status();
}

// ---- what leaves

Status SimChannel::put(const PutRequest& request) {
  if (request.data.size() > wire::kMaxPutBytes)
    return {ErrorCode::kInvalidArgument, "a put takes at most 64 MiB"};
  if (!wire::isSignalOffset(request.signal.offset))
    return {ErrorCode::kInvalidArgument, "a signal's word is 8-aligned and behind the doorbell"};
  std::lock_guard lock(mutex_);
  MOONCAKE_TRY(usable());
  SimPacket packet{.kind = Kind::kPut,
                   .number = ++lastNumber_,
                   .key = request.region.key,
                   .offset = request.offset,
                   .length = request.data.size(),
                   .signal = request.signal};
  const auto now = Clock::now();
  std::erase_if(lastPuts_, [&](const auto& entry) { return entry.second <= now; });
  auto& last = lastPuts_[{request.region.key, request.signal.offset}];
  const auto earliest = last;
  for (const auto& piece : dice_.cut(request.data.size())) {
    packet.position = piece.position;
    const auto data = request.data.subspan(piece.position, piece.bytes);
    const auto when = std::max(now + piece.delay, earliest);
    last = std::max(last, when);
    hold({.packet = packet, .data = Bytes(data.begin(), data.end())}, when);
  }
  release();
  perhapsBreak();  // half of it may have left
  return {};
}

Status SimChannel::get(const GetRequest& request) {
  std::lock_guard lock(mutex_);
  MOONCAKE_TRY(usable());
  if (fenced_) return {ErrorCode::kAborted, "the peer is no longer part of the job"};
  request.completion->begin();
  const uint64_t number = ++lastNumber_;
  transfers_.emplace(number, Transfer{.target = request.target, .completion = request.completion});
  const SimPacket packet{.kind = Kind::kGet,
                         .number = number,
                         .key = request.region.key,
                         .offset = request.offset,
                         .length = request.target.size()};
  hold({.packet = packet}, Clock::now() + dice_.delay());
  release();
  perhapsBreak();
  return {};
}

Status SimChannel::write(const WriteRequest& request) {
  std::lock_guard lock(mutex_);
  MOONCAKE_TRY(usable());
  if (fenced_) return {ErrorCode::kAborted, "the peer is no longer part of the job"};
  request.completion->begin();
  SimPacket packet{.kind = Kind::kWrite,
                   .number = ++lastNumber_,
                   .key = request.region.key,
                   .offset = request.offset,
                   .length = request.source.size()};
  transfers_.emplace(packet.number, Transfer{.completion = request.completion});
  const auto now = Clock::now();
  for (const auto& piece : dice_.cut(request.source.size())) {
    packet.position = piece.position;
    const auto data = request.source.subspan(piece.position, piece.bytes);
    hold({.packet = packet, .data = Bytes(data.begin(), data.end())}, now + piece.delay);
  }
  release();
  perhapsBreak();
  return {};
}

Status SimChannel::send(ByteView message) {
  if (message.empty() || message.size() > kMaxMessageBytes)
    return {ErrorCode::kInvalidArgument, "a message has 1 byte to 64 KiB"};
  std::lock_guard lock(mutex_);
  MOONCAKE_TRY(usable());
  const auto due = Clock::now() + dice_.delay();
  for (size_t at = 0; at < message.size(); at += kMostData) {
    const ByteView data = message.subspan(at, std::min(kMostData, message.size() - at));
    const SimPacket packet{
        .kind = Kind::kMessage, .first = at == 0, .last = at + data.size() == message.size()};
    hold({.packet = packet, .data = Bytes(data.begin(), data.end())}, due);
  }
  release();
  return {};
}

void SimChannel::hold(Held held, Clock::time_point when) {
  if (held.packet && held.packet->kind == Kind::kMessage)
    lastMessage_ = when = std::max(when, lastMessage_);
  held_.emplace(when, std::move(held));  // behind all that are due then
}

// All that is due, whoever comes by.
void SimChannel::release() {
  if (!below_ || lost_) return;
  const auto now = Clock::now();
  auto pause = Clock::duration::zero();
  for (size_t sent = 0; !lost_ && !held_.empty() && held_.begin()->first <= now;) {
    if (sent >= kMostAtOnce) break;
    Held& next = held_.begin()->second;
    if (let(next).code() == ErrorCode::kExhausted) {
      pause = kPause;
      break;
    }
    sent += next.data.size();
    held_.erase(held_.begin());
  }
  if (!held_.empty()) wakeAt(std::max(held_.begin()->first, now + pause));
}

// Lets it happen. Only kExhausted is of interest: where the wire below has broken, we are told.
Status SimChannel::let(Held& held) {
  if (!held.packet) {
    perhapsBreak();  // the completion is lost, the data has come
    finish(held.finished, ErrorCode::kOk);
    return {};
  }
  SimPacket& packet = *held.packet;
  if (packet.kind == Kind::kAnswer && packet.status == SimPacket::Status::kOk) {
    const auto use = context_.regions.open(packet.key, packet.offset, packet.length, kRemoteRead);
    if (fenced_) {
      packet.status = SimPacket::Status::kAborted;
    } else if (!use) {
      packet.status = SimPacket::Status::kRefused;
    } else {
      held.data.assign(use.data() + packet.position, use.data() + packet.position + held.bytes);
    }
  }
  return below_->send(packet.encode(held.data));
}

void SimChannel::wakeAt(Clock::time_point when) {
  if (wakesAt_ <= when) return;
  wakesAt_ = when;
  context_.loop.runAt(Deadline::at(when), [weak = weak_from_this(), when] {
    if (const auto self = weak.lock()) self->onTimer(when);
  });
}

void SimChannel::onTimer(Clock::time_point when) {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  if (wakesAt_ == when) wakesAt_ = Clock::time_point::max();  // else an earlier one came after it
  release();
}

// ---- what arrives

void SimChannel::onPacket(ByteView bytes) {
  ByteReader in(bytes);
  const auto packet = SimPacket::decode(in);
  if (!packet.ok()) return log(LogLevel::kError, "sim", packet.error().message);
  const ByteView data = in.getRaw(in.left());
  std::optional<Bytes> message;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    switch (packet->kind) {
      case Kind::kPut:
        land(*packet, data);
        break;
      case Kind::kGet:
        answer(*packet);
        break;
      case Kind::kAnswer:
        take(*packet, data);
        break;
      case Kind::kMessage:
        message = gather(*packet, data);
        break;
      case Kind::kWrite:
        landWrite(*packet, data);
        break;
      case Kind::kWritten:
        if (transfers_.contains(packet->number) && packet->status == SimPacket::Status::kOk) {
          hold({.finished = packet->number}, Clock::now() + dice_.delay());
        } else {
          finish(packet->number, packet->status == SimPacket::Status::kAborted
                                     ? ErrorCode::kAborted
                                     : ErrorCode::kRefused);
        }
        break;
    }
    release();
  }
  if (message) context_.onMessage(peer_, *message);
}

void SimChannel::land(const SimPacket& piece, ByteView data) {
  if (fenced_) return;
  Put& put = puts_[piece.number];
  put.isDropped = put.isDropped || !place(piece, data);
  put.arrived += data.size();
  if (put.arrived < piece.length) return;
  const bool isWhole = !put.isDropped;
  puts_.erase(piece.number);
  if (!isWhole) return;
  const auto use = context_.regions.open(piece.key, piece.signal.offset, 8, kRemoteWrite);
  if (use && tryStamp(wordAt(use), piece.signal.stamp))
    reinterpret_cast<Doorbell*>(use.regionStart())->ring();
}

bool SimChannel::place(const SimPacket& piece, ByteView data) {
  const auto word = context_.regions.open(piece.key, piece.signal.offset, 8, kRemoteWrite);
  const bool isAligned = reinterpret_cast<uintptr_t>(word.data()) % 8 == 0;
  if (word && isAligned && !canStamp(wordAt(word), piece.signal.stamp)) return false;  // late
  // The whole range: a put that leaves the region writes nothing, not even the part inside.
  const auto use = context_.regions.open(piece.key, piece.offset, piece.length, kRemoteWrite);
  const bool isFree = piece.offset >= sizeof(Doorbell) || piece.length == 0;
  if (!word || !isAligned || !use || !isFree) {
    if (!std::exchange(loggedRefusal_, true))
      log(LogLevel::kWarning, "sim", "a put outside of the registered regions was refused: key ",
          piece.key, ", offset ", piece.offset, ", ", piece.length, " bytes");
    return false;
  }
  if (!data.empty()) std::memcpy(use.data() + piece.position, data.data(), data.size());
  return true;
}

void SimChannel::landWrite(const SimPacket& piece, ByteView data) {
  Write& write = writes_[piece.number];
  if (fenced_) {
    write.status = SimPacket::Status::kAborted;
  } else if (const auto use =
                 context_.regions.open(piece.key, piece.offset, piece.length, kRemoteWrite);
             !use) {
    write.status = SimPacket::Status::kRefused;
  } else if (write.status == SimPacket::Status::kOk && !data.empty()) {
    std::memcpy(use.data() + piece.position, data.data(), data.size());
  }
  write.arrived += data.size();
  if (write.arrived < piece.length) return;
  const SimPacket packet{.kind = Kind::kWritten, .status = write.status, .number = piece.number};
  writes_.erase(piece.number);
  hold({.packet = packet}, Clock::now() + dice_.delay());
}

void SimChannel::answer(const SimPacket& get) {
  SimPacket packet = get;
  packet.kind = Kind::kAnswer;
  if (!context_.regions.open(get.key, get.offset, get.length, kRemoteRead)) {
    packet.status = SimPacket::Status::kRefused;
    return hold({.packet = packet}, Clock::now() + dice_.delay());
  }
  for (const auto& piece : dice_.cut(get.length)) {
    packet.position = piece.position;
    hold({.packet = packet, .bytes = piece.bytes}, Clock::now() + piece.delay);
  }
}

void SimChannel::take(const SimPacket& answer, ByteView data) {
  const auto found = transfers_.find(answer.number);
  if (found == transfers_.end()) return;  // it has ended
  if (answer.status != SimPacket::Status::kOk) {
    return finish(answer.number, answer.status == SimPacket::Status::kAborted
                                     ? ErrorCode::kAborted
                                     : ErrorCode::kRefused);
  }
  Transfer& get = found->second;
  if (answer.length != get.target.size()) return finish(answer.number, ErrorCode::kProtocol);
  if (!data.empty()) std::memcpy(get.target.data() + answer.position, data.data(), data.size());
  get.arrived += data.size();
  if (get.arrived == get.target.size())
    hold({.finished = answer.number}, Clock::now() + dice_.delay());
}

// The message once it is whole.
std::optional<Bytes> SimChannel::gather(const SimPacket& piece, ByteView data) {
  if (piece.first) arriving_.clear();
  if (!piece.first && arriving_.empty()) return std::nullopt;  // its beginning was lost
  arriving_.insert(arriving_.end(), data.begin(), data.end());
  if (!piece.last) return std::nullopt;
  return std::exchange(arriving_, {});
}

// ---- how things end

void SimChannel::finish(uint64_t transfer, ErrorCode code) {
  if (const auto found = transfers_.extract(transfer)) found.mapped().completion->end(code);
}

void SimChannel::finishAll(ErrorCode code) {
  for (const auto& [number, transfer] : transfers_) transfer.completion->end(code);
  transfers_.clear();
}

void SimChannel::cancel(const Completion* completion) {
  std::lock_guard lock(mutex_);
  std::erase_if(transfers_, [&](const auto& entry) {
    const bool counts = entry.second.completion == completion;
    if (counts) entry.second.completion->end(ErrorCode::kAborted);
    return counts;
  });
}

void SimChannel::fence() {
  std::lock_guard lock(mutex_);
  fenced_ = true;
  puts_.clear();
  finishAll(ErrorCode::kAborted);
}

void SimChannel::close() {
  std::shared_ptr<Channel> below;
  {
    std::lock_guard lock(mutex_);
    below = below_;
    if (!std::exchange(closed_, true)) {
      // What was put and sent still arrives, also what a break of ours holds: one that catches a
      // goodbye is not cured.
      for (auto& [when, held] : held_) {
        if (below && held.packet &&
            (held.packet->kind == Kind::kPut || held.packet->kind == Kind::kMessage))
          (void)let(held);
      }
      held_.clear();
      finishAll(ErrorCode::kAborted);
    }
  }
  if (below) below->close();
}

void SimChannel::lose(const Error& why) {
  if (!lost_) lost_ = why;
  finishAll(ErrorCode::kPeerLost);
}

// Not before the last break is over for the engine: it must have heard of the peer.
void SimChannel::perhapsBreak() {
  if (!dice_.breaks(options_.breakOdds)) return;
  if (lost_ || Clock::now() < standsUntil_ || below_->lifeSigns() == heard_) return;
  lose({ErrorCode::kPeerLost, "the simulated connection broke"});
  context_.loop.post([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->tellOfBreak();
  });
}

void SimChannel::tellOfBreak() {
  if (isOver()) return;
  context_.onEnded(peer_, {Evidence::Kind::kUnreachable, "the simulated connection broke"});
}

void SimChannel::onEnded(const Evidence& evidence) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    hasLeft_ = hasLeft_ || evidence.isGoodbye();
    const bool isKnown = lost_.has_value();
    lose({ErrorCode::kPeerLost, evidence.detail});
    if (isKnown && !evidence.isGoodbye()) return;
  }
  context_.onEnded(peer_, evidence);
}

void SimChannel::restart() {
  std::lock_guard lock(mutex_);
  finishAll(ErrorCode::kPeerLost);
  held_.clear();
  puts_.clear();
  writes_.clear();
  arriving_.clear();
  lost_.reset();
  standsUntil_ = Clock::now() + kLeastStanding;
  heard_ = below_->lifeSigns();
}

}  // namespace mooncake
