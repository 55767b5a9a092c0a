#include "wires/nic/sim/sim_nic.h"

#include <algorithm>
#include <cstring>

namespace mooncake {
namespace {

constexpr size_t kMostCarried = size_t(48) << 10;  // data in one message

}  // namespace

Bytes SimNic::Message::encode(std::span<const std::byte> data) const {
  ByteWriter out;
  out.put(static_cast<uint8_t>(kind)).put(static_cast<uint8_t>(answer)).put(to).put(toLife);
  out.put(from.index).put(from.life).put(operation).put(key).put(offset).put(length).put(position);
  out.put(micros);
  return out.putRaw(data).take();
}

std::optional<SimNic::Message> SimNic::Message::decode(ByteReader& in) {
  Message message;
  message.kind = static_cast<Kind>(in.get<uint8_t>());
  message.answer = static_cast<Answer>(in.get<uint8_t>());
  message.to = in.get<uint32_t>();
  message.toLife = in.get<uint64_t>();
  message.from.index = in.get<uint32_t>();
  message.from.life = in.get<uint64_t>();
  message.operation = in.get<uint64_t>();
  message.key = in.get<uint64_t>();
  message.offset = in.get<uint64_t>();
  message.length = in.get<uint64_t>();
  message.position = in.get<uint64_t>();
  message.micros = in.get<uint64_t>();
  const bool fits =
      message.position <= message.length && in.left() <= message.length - message.position;
  if (in.failed() || (message.kind != Kind::kPacket && !fits)) return std::nullopt;
  return message;
}

std::optional<uint32_t> SimNic::cardOf(ByteView bytes) {
  ByteReader in(bytes);
  const auto message = Message::decode(in);
  return message ? std::optional(message->to) : std::nullopt;
}

SimNic::SimNic(Options options)
    : options_(std::move(options)),
      life_(SimDice(options_.seed ^ static_cast<uint64_t>(Clock::now().time_since_epoch().count()))
                .below(UINT64_MAX)),
      name_("sim" + std::to_string(options_.index)),
      dice_(options_.seed) {
  limits_ = {.mostSendBytes = (4 + dice_.below(40)) << 10,
             .mostRmaBytes = (64 + dice_.below(1024)) << 10,
             .sendDepth = kSlots,
             .receiveDepth = kSlots,
             .remoteRead = true,
             .remoteWrite = true,
             .deviceMemory = false,
             .withdrawalStops = options_.withdrawalStops,
             .closeEndsReads = options_.closeEndsReads};
  // A renewed card has the same limits, and other faults.
  if (options_.turn != 0) dice_ = SimDice(options_.seed ^ options_.turn << 32);
}

SimNic::~SimNic() {
  if (options_.onGone) options_.onGone();
}

Bytes SimNic::address() const {
  return ByteWriter().putRaw(options_.host).put(options_.index).put(life_).take();
}

Result<NicPeer> SimNic::insert(ByteView bytes) {
  ByteReader in(bytes);
  Address address;
  const auto raw = in.getRaw(address.host.size());
  std::copy(raw.begin(), raw.end(), address.host.begin());
  address.index = in.get<uint32_t>();
  address.life = in.get<uint64_t>();
  MOONCAKE_TRY(in.finish("address of a simulated card"));
  Lock lock(mutex_);
  const auto [found, isNew] = known_.try_emplace(address, peers_.size() + 1);
  if (isNew) peers_.push_back(address);
  return found->second;
}

void SimNic::remove(NicPeer peer) {
  Lock lock(mutex_);
  if (peer == 0 || peer > peers_.size()) return;
  known_.erase(peers_[peer - 1]);
  const auto now = Clock::now();
  for (auto& [number, operation] : operations_) {
    if (operation.peer == peer) end(number, NicError::kCancelled, now);
  }
}

// ---- requests

// Begins an operation and decides its fate; kNone: no fault.
Status SimNic::begin(Operation operation, uint64_t& number, NicError& fate) {
  const auto now = Clock::now();
  if (isClosed_) return {ErrorCode::kAborted, "the card is closed"};
  if (dice_.once(options_.odds.storm))
    stormUntil_ = now + std::chrono::microseconds(dice_.below(kMostStorm.count()));
  if (operations_.size() >= kSlots || now < stormUntil_)
    return {ErrorCode::kExhausted, "the card has no room"};
  if (operation.peer == 0 || operation.peer > peers_.size())
    return {ErrorCode::kInvalidArgument, "no such peer"};
  if (dice_.once(options_.odds.death)) {
    deadUntil_ = now + std::chrono::microseconds(dice_.below(1000 * kMostDeath.count()));
    die();
  }
  number = ++lastNumber_;
  operation.deadline = now + kTimeLimit;
  operations_[number] = operation;
  fate = NicError::kNone;
  if (isDead(now) || dice_.once(options_.odds.failed)) {
    fate = NicError::kUnreachable;
    end(number, fate, now + dice_.delay());
  }
  due_.notify_all();
  return {};
}

Status SimNic::send(NicPeer peer, NicBuffer header, NicBuffer body, void* context) {
  Lock lock(mutex_);
  const uint64_t bytes = header.bytes.size() + body.bytes.size();
  if (bytes > limits_.mostSendBytes) return {ErrorCode::kInvalidArgument, "too long a packet"};
  uint64_t number = 0;
  NicError fate{};
  MOONCAKE_TRY(
      begin({.kind = NicCompletion::Kind::kSent, .peer = peer, .context = context, .bytes = bytes},
            number, fate));
  if (fate != NicError::kNone) return {};
  const auto now = Clock::now();
  Out out{.to = peers_[peer - 1],
          .message = {.kind = Kind::kPacket, .length = bytes},
          .header = header.bytes,
          .body = body.bytes,
          .sent = number};
  if (dice_.once(options_.odds.late)) {
    end(number, NicError::kUnreachable, now + dice_.delay());
    out.owned.assign(header.bytes.begin(), header.bytes.end());
    out.owned.insert(out.owned.end(), body.bytes.begin(), body.bytes.end());
    out.header = out.body = {};
    out.sent = 0;
    out_.emplace(now + std::chrono::microseconds(drawLateness()), std::move(out));
    return {};
  }
  out.losesCompletion = dice_.once(options_.odds.lost);
  out_.emplace(now + dice_.delay(), std::move(out));
  return {};
}

Status SimNic::receive(NicBuffer buffer, void* context) {
  Lock lock(mutex_);
  if (receives_.size() >= kSlots) return {ErrorCode::kExhausted, "the card has no room"};
  receives_.push_back({buffer, context});
  return {};
}

Status SimNic::read(NicPeer peer, NicBuffer target, NicKey from, uint64_t offset, void* context) {
  Lock lock(mutex_);
  uint64_t number = 0;
  NicError fate{};
  MOONCAKE_TRY(begin({.kind = NicCompletion::Kind::kRead,
                      .peer = peer,
                      .context = context,
                      .target = target.bytes,
                      .bytes = target.bytes.size()},
                     number, fate));
  if (fate != NicError::kNone) return {};
  out_.emplace(Clock::now() + dice_.delay(), Out{.to = peers_[peer - 1],
                                                 .message = {.kind = Kind::kRead,
                                                             .operation = number,
                                                             .key = from.key,
                                                             .offset = from.base + offset,
                                                             .length = target.bytes.size()}});
  return {};
}

Status SimNic::write(NicPeer peer, NicBuffer source, NicKey to, uint64_t offset, void* context) {
  Lock lock(mutex_);
  uint64_t number = 0;
  NicError fate{};
  MOONCAKE_TRY(begin({.kind = NicCompletion::Kind::kWritten,
                      .peer = peer,
                      .context = context,
                      .bytes = source.bytes.size()},
                     number, fate));
  if (fate != NicError::kNone) return {};
  const auto now = Clock::now();
  const bool isLate = dice_.once(options_.odds.late) || dice_.once(options_.odds.lateWrites);
  if (isLate) end(number, NicError::kUnreachable, now + dice_.delay());
  const bool isSlow = !isLate && dice_.once(options_.odds.slowWrites);
  if (isSlow) operations_[number].deadline += options_.odds.lateness;
  cut({.to = peers_[peer - 1],
       .message = {.kind = Kind::kWrite,
                   .operation = number,
                   .key = to.key,
                   .offset = to.base + offset,
                   .length = source.bytes.size()}},
      source.bytes, now, isLate, isSlow);
  return {};
}

uint64_t SimNic::drawLateness() { return dice_.below(1000 * options_.odds.lateness.count()); }

// Cuts into messages that leave in any order. If the operation is late, the source is the caller's
// again. If it is slow, its messages leave at once, and nothing here holds them up any more.
void SimNic::cut(const Out& whole, std::span<const std::byte> data, Time now, bool isLate,
                 bool isSlow) {
  for (uint64_t position = 0; position < data.size() || position == 0;) {
    const auto piece = data.subspan(position, std::min(kMostCarried, data.size() - position));
    Out out = whole;
    out.message.position = position;
    if (isLate) {
      out.owned.assign(piece.begin(), piece.end());
      out_.emplace(now + std::chrono::microseconds(drawLateness()), std::move(out));
    } else {
      if (isSlow) out.message.micros = drawLateness();
      out.header = piece;
      out_.emplace(now + dice_.delay(), std::move(out));
    }
    position += piece.size();
    if (piece.empty()) break;
  }
}

// ---- outcomes

void SimNic::end(uint64_t number, NicError error, Time when) {
  const auto found = operations_.find(number);
  if (found == operations_.end() || std::exchange(found->second.hasEnded, true)) return;
  found->second.target = {};
  // Drops messages of the operation that have not left.
  std::erase_if(out_, [&](const auto& entry) {
    const Out& out = entry.second;
    const bool isOf = out.sent == number ||
                      (out.message.operation == number &&
                       (out.message.kind == Kind::kRead || out.message.kind == Kind::kWrite));
    return isOf && out.owned.empty();
  });
  ends_.emplace(when, std::pair(number, error));
}

void SimNic::die() {
  const auto now = Clock::now();
  for (auto& [number, operation] : operations_) end(number, NicError::kUnreachable, now);
  out_.clear();
  in_.clear();
  writing_.clear();
}

void SimNic::kill() {
  Lock lock(mutex_);
  isKilled_ = true;
  die();
  due_.notify_all();
}

void SimNic::revive() {
  Lock lock(mutex_);
  isKilled_ = false;
  due_.notify_all();
}

uint64_t SimNic::carried() const {
  Lock lock(mutex_);
  return carried_;
}

uint64_t SimNic::refused() const {
  Lock lock(mutex_);
  return refused_;
}

void SimNic::arrive(const Host& from, ByteView message) {
  Lock lock(mutex_);
  const auto now = Clock::now();
  if (isClosed_ || isDead(now)) return;
  ByteReader in(message);
  const auto decoded = Message::decode(in);
  const auto onItsWay = std::chrono::microseconds(decoded ? decoded->micros : 0);
  in_.emplace(now + onItsWay, In{from, Bytes(message.begin(), message.end())});
  due_.notify_all();
}

size_t SimNic::poll(std::span<NicCompletion> into) {
  const auto now = Clock::now();
  carryDue(now);
  Lock lock(mutex_);
  landUntil(now);
  for (auto due = in_.begin(); due != in_.end() && due->first <= now;) {
    const auto one = in_.extract(due++);
    take(one.mapped(), now);
  }
  std::vector<uint64_t> overdue;
  for (const auto& [number, operation] : operations_) {
    if (!operation.hasEnded && operation.deadline <= now) overdue.push_back(number);
  }
  for (const uint64_t number : overdue) {
    operations_[number].isAbandoned = true;
    end(number, NicError::kUnreachable, now);
  }
  size_t count = 0;
  while (count < into.size() && !completions_.empty() && completions_.begin()->first <= now) {
    into[count++] = completions_.begin()->second;
    completions_.erase(completions_.begin());
  }
  while (count < into.size() && !ends_.empty() && ends_.begin()->first <= now) {
    const auto [number, error] = ends_.begin()->second;
    ends_.erase(ends_.begin());
    const auto operation = operations_.extract(number);
    into[count++] = {.kind = operation.mapped().kind,
                     .error = error,
                     .bytes = operation.mapped().bytes,
                     .context = operation.mapped().context,
                     .providerError = 0,
                     .abandoned = operation.mapped().isAbandoned};
  }
  return count;
}

// Carries without the lock, because the carrier may take other locks.
void SimNic::carryDue(Time now) {
  for (;;) {
    Address to;
    Bytes message;
    uint64_t sent;
    bool losesCompletion;
    decltype(out_)::node_type one;
    {
      Lock lock(mutex_);
      if (out_.empty() || out_.begin()->first > now) return;
      one = out_.extract(out_.begin());
      Out& out = one.mapped();
      out.message.to = out.to.index;
      out.message.toLife = out.to.life;
      out.message.from = {options_.host, options_.index, life_};
      Bytes data = out.owned;
      data.insert(data.end(), out.header.begin(), out.header.end());
      data.insert(data.end(), out.body.begin(), out.body.end());
      message = out.message.encode(data);
      to = out.to;
      sent = out.sent;
      losesCompletion = out.losesCompletion;
    }
    const Status carried = options_.carry(to.host, message);
    Lock lock(mutex_);
    if (carried.code() == ErrorCode::kExhausted) {
      Out& out = one.mapped();
      // If the operation is over, its memory belongs to the caller again, so it is not offered once
      // more.
      const auto found = operations_.find(sent != 0 ? sent : out.message.operation);
      const bool isOver = found == operations_.end() || found->second.hasEnded;
      if (!isOver || !out.owned.empty()) out_.emplace(now + std::chrono::milliseconds(1), out);
      return;
    }
    carried_ += carried.ok();
    if (!carried.ok()) {
      const uint64_t number = sent != 0 ? sent : one.mapped().message.operation;
      end(number, NicError::kUnreachable, now);
    } else if (sent != 0 && !losesCompletion) {
      end(sent, NicError::kNone, now + dice_.delay());
    }
  }
}

SimNic::Time SimNic::nextDue() const {
  Time next = Time::max();
  if (!out_.empty()) next = std::min(next, out_.begin()->first);
  if (!in_.empty()) next = std::min(next, in_.begin()->first);
  if (!landings_.empty()) next = std::min(next, landings_.begin()->first);
  if (!completions_.empty()) next = std::min(next, completions_.begin()->first);
  if (!ends_.empty()) next = std::min(next, ends_.begin()->first);
  for (const auto& [number, operation] : operations_) {
    if (!operation.hasEnded) next = std::min(next, operation.deadline);
  }
  return next;
}

void SimNic::wait(Deadline deadline) {
  Lock lock(mutex_);
  while (!isWoken_) {
    const auto until = std::min(deadline.when(), nextDue());
    if (Clock::now() >= until || due_.wait_until(mutex_, until) == std::cv_status::timeout) break;
  }
  isWoken_ = false;
}

void SimNic::wake() {
  Lock lock(mutex_);
  isWoken_ = true;
  due_.notify_all();
}

void SimNic::close() {
  Lock lock(mutex_);
  isClosed_ = true;
  landUntil(Time::max());
  const auto now = Clock::now();
  for (auto& [number, operation] : operations_) end(number, NicError::kCancelled, now);
  for (auto& [when, ended] : std::exchange(ends_, {}))
    ends_.emplace(now, std::pair(ended.first, ended.second));
  out_.clear();
  in_.clear();
  registered_.clear();
  withdrawn_.clear();
  writing_.clear();
}

}  // namespace mooncake
