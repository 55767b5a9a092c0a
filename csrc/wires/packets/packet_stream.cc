#include "wires/packets/packet_stream.h"

#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "wires/stream/wire.h"

namespace mooncake {
namespace {

using Kind = Packet::Kind;

constexpr size_t kAckEvery = 16;  // packets after which an acknowledgement leaves
constexpr auto kAckDelay = std::chrono::milliseconds(1);
constexpr uint64_t kQuantum = 16;  // packets of one transfer before the next has its turn
// Number of packets that leave their buffers at one tick, so that other channels do not wait for
// the copies.
constexpr size_t kMostMovedOut = 32;
// Number of transfers and answers that may wait to leave before requests of the peer are refused.
// An honest peer has fewer under way.
constexpr size_t kMostBulk = 65536;

}  // namespace

PacketStream::PacketStream(Options options, RegionTable& regions, PacketPool& pool)
    : options_(std::move(options)),
      regions_(regions),
      pool_(pool),
      buffers_(pool),
      paths_(options_.stallLimit),
      incoming_(regions) {}

// ---- the connection

void PacketStream::open(uint64_t incarnation, size_t packetBytes) {
  peer_ = {.incarnation = incarnation, .packetBytes = packetBytes};
  paths_.reset(options_.pathNames.size());
}

void PacketStream::awaitProbes(Clock::time_point now) {
  for (size_t i = 0; i < paths_.count(); ++i) paths_.leaveOut(i, now);
}

void PacketStream::breakOff() {
  isLost_ = true;
  dropBulk();
}

void PacketStream::restart() {
  dropBulk();
  puts_.restart();
  sent_.clear();
  plain_.clear();
  lastSerial_ = 0;
  serials_ = {};
  incoming_.clear();
  isHeld_ = true;
  held_.clear();
  owed_ = {};
  peer_.reset();
  isLost_ = false;
}

std::vector<std::pair<Packet, Bytes>> PacketStream::release() {
  isHeld_ = false;
  return std::exchange(held_, {});
}

std::vector<uint64_t> PacketStream::fence(Clock::time_point now) {
  isFenced_ = true;
  incoming_.clear();
  std::vector<uint64_t> landed;
  for (const auto& [serial, sent] : sent_) {
    if (sent.kind == Kind::kWritten && sent.status == Packet::Status::kOk)
      landed.push_back(sent.number);
  }
  for (const PacketSource& source : bulk_) {
    if (source.packet.kind == Kind::kWritten && source.packet.status == Packet::Status::kOk)
      landed.push_back(source.packet.number);
  }
  dropBulk();
  // The list proves all that has to be proven to the peer. So no buffer, and no operation of a
  // card, waits for it.
  sent_.drop();
  puts_.clear();
  return landed;
}

void PacketStream::shutOut(Clock::time_point now) {
  isOut_ = true;
  dropBulk();
  sent_.drop();
  puts_.clear();
}

void PacketStream::close() {
  dropBulk();
  puts_.clear();
  sent_.clear();
}

// Sources are not read any more, nor is the peer answered.
void PacketStream::dropBulk() {
  bulk_.clear();
  answering_ = 0;
}

// ---- requests

uint64_t PacketStream::put(const PutRequest& request) {
  if (puts_.remembersMany()) puts_.forgetBelow(firstUnacknowledgedPut());
  return puts_.add(request, nextRail());
}

uint64_t PacketStream::firstUnacknowledgedPut() const {
  for (const auto& [serial, sent] : sent_) {
    if (sent.kind == Kind::kPut) return sent.number;
  }
  return puts_.last() + 1;
}

void PacketStream::announce(const RemoteSignal& signal) {
  if (signal.region.key == 0 || !putsCount()) return;
  put({.region = signal.region,
       .offset = signal.signal.offset,
       .data = {},
       .signal = signal.signal});
}

void PacketStream::get(Range from, const Transfer& transfer) {
  const uint64_t number = nextNumber();
  transfers_.emplace(number, transfer);
  bulk_.push_front({.packet = {.kind = Kind::kGet,
                               .number = number,
                               .key = from.key,
                               .offset = from.offset,
                               .length = transfer.target.size()},
                    .firstRail = nextRail()});
}

void PacketStream::write(Range to, std::span<const std::byte> source, const Transfer& transfer) {
  const uint64_t number = nextNumber();
  transfers_.emplace(number, transfer);
  bulk_.push_back({.packet = {.kind = Kind::kWrite,
                              .number = number,
                              .key = to.key,
                              .offset = to.offset,
                              .length = source.size()},
                   .data = source,
                   .completion = transfer.completion,
                   .firstRail = nextRail()});
}

void PacketStream::expectAnswer(uint64_t number, const Transfer& transfer) {
  transfers_.emplace(number, transfer);
}

std::optional<PacketStream::PartEnd> PacketStream::finish(uint64_t transfer, ErrorCode code) {
  const auto found = transfers_.extract(transfer);
  if (!found) return std::nullopt;
  const Transfer& ended = found.mapped();
  if (ended.whole != 0) return PartEnd{ended.whole, code};
  if (code == ErrorCode::kOk) announce(ended.announcement);
  ended.completion->end(code);
  return std::nullopt;
}

std::vector<uint64_t> PacketStream::finishAll(ErrorCode code) {
  std::vector<uint64_t> wholes;
  for (const auto& [number, transfer] : std::exchange(transfers_, {})) {
    if (transfer.whole == 0) {
      transfer.completion->end(code);
    } else {
      wholes.push_back(transfer.whole);
    }
  }
  return wholes;
}

void PacketStream::cancel(const Completion* completion) {
  std::erase_if(bulk_, [&](PacketSource& source) {
    if (source.completion != completion) return false;
    if (source.pieces == 0) return true;
    source.packet.status = Packet::Status::kAborted;
    source.data = {};
    source.completion = nullptr;
    return false;
  });
  std::erase_if(transfers_, [&](const auto& entry) {
    const bool counts = entry.second.completion == completion;
    if (counts && entry.second.whole == 0) entry.second.completion->end(ErrorCode::kAborted);
    return counts;
  });
}

void PacketStream::answer(uint64_t number, Range from, uint64_t bytes) {
  if (isLost_) return;  // the peer asks again on the next connection
  if (answering_ >= wire::kMaxTransfers) {
    ++bad_;
    return;
  }
  ++answering_;
  bulk_.push_back({.packet = {.kind = Kind::kAnswer, .number = number, .length = bytes},
                   .fromKey = from.key,
                   .fromOffset = from.offset,
                   .firstRail = nextRail()});
}

// ---- packets that leave

size_t PacketStream::packetBytes() const {
  return peer_ ? std::min(peer_->packetBytes, options_.packetBytes) : options_.packetBytes;
}

std::optional<PacketStream::Outgoing> PacketStream::nextPlain() {
  while (!plain_.empty()) {
    const Plain plain = plain_.front();
    plain_.pop_front();
    if (auto packet = makePlain({.kind = plain.kind, .number = plain.number}, {}))
      return Outgoing{plain.path, std::move(packet)};
  }
  if (!std::exchange(owed_.isWanted, false) || isLost_) return std::nullopt;
  const auto path = paths_.choose(nextRail());
  if (!path) return std::nullopt;
  const std::vector<uint64_t> above(serials_.above().begin(), serials_.above().end());
  auto packet = makePlain({.kind = Kind::kAck}, above);
  if (!packet) return std::nullopt;  // the next tick tries again
  owed_.count = 0;
  return Outgoing{*path, std::move(packet)};
}

// Makes a packet without a serial. Returns null if there is no buffer, or no connection.
std::shared_ptr<OutPacket> PacketStream::makePlain(Packet packet,
                                                   std::span<const uint64_t> numbers) {
  auto out = peer_ ? OutPacket::make(pool_, buffers_, /*isUrgent=*/true) : nullptr;
  if (!out) return nullptr;
  packet.incarnation = peer_->incarnation;
  packet.acked = serials_.below();
  packet.encode(std::span<std::byte, Packet::kBytes>(out->data(), Packet::kBytes));
  const size_t bytes = std::min(numbers.size_bytes(), (packetBytes() - Packet::kBytes) / 8 * 8);
  if (bytes > 0) std::memcpy(out->data() + Packet::kBytes, numbers.data(), bytes);
  out->length = Packet::kBytes + bytes;
  return out;
}

// Returns the first packet from serial `from` on that waits for another path.
std::optional<PacketStream::Outgoing> PacketStream::nextRepeated(uint64_t& from,
                                                                 Clock::time_point now) {
  const auto serial = sent_.waiting() > 0 ? sent_.firstWaiting(from) : std::nullopt;
  if (!serial) return std::nullopt;
  const auto path = paths_.choose(nextRail());
  if (!path || !sent_.at(*serial).packet->moveIn())
    return std::nullopt;  // the next tick tries again
  from = *serial + 1;
  return Outgoing{*path, sent_.moveTo(*path, *serial, now).packet};
}

std::optional<PacketStream::Outgoing> PacketStream::nextNew(Clock::time_point now) {
  const size_t window = std::min(kMostWindow, kWindow * std::max<size_t>(1, paths_.up()));
  if (sent_.size() >= window || (puts_.empty() && bulk_.empty())) return std::nullopt;
  // In turn, so that neither waits for all of the other.
  isBulksTurn_ = bulk_.empty() ? false : puts_.empty() || !isBulksTurn_;
  bool isLast = false;
  if (!isBulksTurn_) {
    auto out = nextOf(puts_.front(), now, isLast);
    if (isLast) puts_.pop();
    return out;
  }
  PacketSource& source = bulk_.front();
  auto out = nextOf(source, now, isLast);
  if (isLast) {
    if (source.packet.kind == Kind::kAnswer) --answering_;
    bulk_.pop_front();
  } else if (out && source.pieces % kQuantum == 0 && bulk_.size() > 1) {
    bulk_.push_back(std::move(source));
    bulk_.pop_front();
  }
  return out;
}

// Returns the next packet of the source. Returns none if there is no path, or no buffer.
std::optional<PacketStream::Outgoing> PacketStream::nextOf(PacketSource& source,
                                                           Clock::time_point now, bool& isLast) {
  const bool isOneOfFew = puts_.size() + bulk_.size() < paths_.count();
  const bool isSplit = source.packet.length >= splitBytes(isOneOfFew);
  auto path = source.path;
  if (isSplit || !path || !paths_.isUp(*path))
    path = paths_.choose(source.firstRail + source.pieces);
  if (!path) return std::nullopt;
  auto packet = OutPacket::make(pool_, buffers_);
  if (!packet) return std::nullopt;  // the next tick tries again
  source.path = path;
  packet->length = fill(source, {packet->data(), packetBytes()}, isLast);
  sent_.add(lastSerial_,
            {.packet = packet,
             .path = *path,
             .kind = source.packet.kind,
             .status = source.packet.status,
             .number = source.packet.number},
            now);
  return Outgoing{*path, std::move(packet)};
}

// Writes the next packet of the source, with the next serial, to `out`. Returns its length.
size_t PacketStream::fill(PacketSource& source, std::span<std::byte> out, bool& isLast) {
  if (serials_.above().empty()) owed_.count = 0;  // the packet acknowledges all
  return source.fill(out,
                     {.incarnation = peer_ ? peer_->incarnation : 0,
                      .serial = ++lastSerial_,
                      .acked = serials_.below()},
                     regions_, isLast);
}

// Encodes the next packet of a put that has not left into `room`. Returns it, or none at the end.
std::optional<ByteView> PacketStream::nextFlushed(Bytes& room) {
  if (puts_.empty()) return std::nullopt;
  bool isLast = false;
  const size_t length = fill(puts_.front(), room, isLast);
  if (isLast) puts_.pop();
  return ByteView(room).first(length);
}

void PacketStream::tick(Clock::time_point now) {
  moveSentOut(now);
  sent_.holdBackOvertaken(now);
  for (const auto& probe : paths_.probes(now))
    plain_.push_back({Kind::kProbe, probe.number, probe.path});
  if (owed_.count > 0 && now >= owed_.due) owed_.isWanted = true;
}

void PacketStream::probe(size_t path) {
  plain_.push_back({Kind::kProbe, paths_.probe(path), path});
}

// Frees the buffers of a peer that acknowledges nothing, for other peers. If the peer is only slow,
// a packet takes a buffer again when it leaves once more.
void PacketStream::moveSentOut(Clock::time_point now) {
  if (sent_.empty() || now - sent_.progress() < options_.stallLimit / 4) return;
  size_t moved = 0;
  for (const auto& [serial, sent] : sent_) {
    if (moved == kMostMovedOut) return;
    moved += sent.packet->moveOut();
  }
}

bool PacketStream::isBusy() const {
  return owed_.count > 0 || paths_.hasWork() || !puts_.empty() || !bulk_.empty() ||
         sent_.waiting() > 0;
}

bool PacketStream::hasWritesUpTo(uint64_t serial) const {
  return std::ranges::any_of(sent_, [&](const auto& entry) {
    return entry.first <= serial && entry.second.kind == Kind::kWrite;
  });
}

void PacketStream::leaveOut(size_t path, Clock::time_point now, const std::string& why,
                            bool isAnew) {
  if (isAnew ? paths_.startAnew(path, now) : paths_.leaveOut(path, now))
    log(LogLevel::kInfo, options_.name, "card ", options_.pathNames[path],
        " is left out for a peer: ", why);
  sent_.holdBack(path);
}

// ---- received packets

PacketStream::Effect PacketStream::receive(size_t path, const Packet& packet, ByteView data,
                                           Clock::time_point now) {
  std::vector<uint64_t> above;
  if (packet.kind == Kind::kAck) {
    above.resize(data.size() / sizeof(uint64_t));
    if (!above.empty()) std::memcpy(above.data(), data.data(), data.size());
  }
  sent_.acknowledge(packet.acked, above, now);
  Effect effect;
  switch (packet.kind) {
    case Kind::kAck:
      return effect;
    case Kind::kProbe:
      if (peer_) plain_.push_back({Kind::kProbed, packet.number, path});
      return effect;
    case Kind::kProbed:
      if (paths_.count() == 0) return effect;
      effect.answered = paths_.pathOf(packet.number);
      effect.isBack = paths_.answered(packet.number, now).has_value();
      if (effect.isBack)
        log(LogLevel::kInfo, options_.name, "card ", options_.pathNames[*effect.answered],
            " reaches its peer again");
      return effect;
    default:
      break;
  }
  if (isFenced_) return effect;
  if (serials_.has(packet.serial)) {
    owe(now);  // the peer has not heard of it
    return effect;
  }
  // A packet that is not acknowledged comes again.
  if (isHeld_ && held_.size() >= kMostWindow) return effect;
  if (!admit(packet, data.size())) return effect;
  if (isHeld_) {
    held_.emplace_back(packet, Bytes(data.begin(), data.end()));
  } else {
    effect = land(packet, data);
  }
  owe(now);
  return effect;
}

void PacketStream::receivePut(const Packet& packet, ByteView data) {
  if (isFenced_ || packet.kind != Kind::kPut || serials_.has(packet.serial)) return;
  if (admit(packet, data.size())) land(packet, data);
}

void PacketStream::owe(Clock::time_point now) {
  if (owed_.count++ == 0) owed_.due = now + kAckDelay;
  if (owed_.count >= kAckEvery) owed_.isWanted = true;
}

// Returns whether the packet has its place here, and counts it. A packet that breaks the rules is
// not acknowledged.
bool PacketStream::admit(const Packet& packet, size_t dataBytes) {
  const bool asks = packet.kind == Kind::kGet || packet.kind == Kind::kWrite;
  const bool hasRoom =
      incoming_.hasRoomFor(packet, dataBytes) && (!asks || bulk_.size() < kMostBulk);
  if (hasRoom && serials_.add(packet.serial)) return true;
  if (bad_++ == 0)
    log(LogLevel::kError, options_.name, "a packet of kind ", int(packet.kind), ", number ",
        packet.number, " breaks the rules: do both ends run the same version?");
  return false;
}

PacketStream::Effect PacketStream::land(const Packet& packet, ByteView data) {
  switch (packet.kind) {
    case Kind::kPut:
      incoming_.put(packet, data);
      return {};
    case Kind::kGet:
      answer(packet.number, {packet.key, packet.offset}, packet.length);
      return {};
    case Kind::kAnswer:
      return landAnswer(packet, data);
    case Kind::kWrite:
      if (const auto ended = incoming_.write(packet, data); ended && !isLost_)
        bulk_.push_front(
            {.packet = {.kind = Kind::kWritten, .status = *ended, .number = packet.number},
             .firstRail = nextRail()});
      return {};
    case Kind::kWritten:
      return {.end = End{packet.number, packet.status == Packet::Status::kOk ? ErrorCode::kOk
                                        : packet.status == Packet::Status::kAborted
                                            ? ErrorCode::kAborted
                                            : ErrorCode::kRefused}};
    default:
      return {};
  }
}

PacketStream::Effect PacketStream::landAnswer(const Packet& answer, ByteView data) {
  const auto found = transfers_.find(answer.number);
  if (found == transfers_.end()) return {.isUnexpected = true};
  if (answer.status != Packet::Status::kOk)
    return {.end = End{answer.number, answer.status == Packet::Status::kAborted
                                          ? ErrorCode::kAborted
                                          : ErrorCode::kRefused}};
  Transfer& get = found->second;
  if (answer.length != get.target.size() || data.size() > get.target.size() - get.arrived)
    return {.end = End{answer.number, ErrorCode::kProtocol}};
  if (!data.empty()) std::memcpy(get.target.data() + answer.position, data.data(), data.size());
  get.arrived += data.size();
  if (get.arrived < get.target.size()) return {};
  return {.end = End{answer.number, ErrorCode::kOk}};
}

}  // namespace mooncake
