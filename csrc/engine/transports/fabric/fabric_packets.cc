#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "engine/stream/wire.h"
#include "engine/transports/fabric/fabric_channel.h"

// What becomes of packets: how they leave, come through, and land.
namespace mooncake {
namespace {

// Packets of one channel that are not acknowledged, for each of its paths that is up: 8 MiB of the
// largest packets, 2 MiB of those of tcp;ofi_rxm. So a link of 1 Gbit/s stays busy while both
// processors have something else to do for 60 ms, or 16.
constexpr size_t kWindow = 128;
constexpr size_t kMostWindow = 512;  // of all: the peer keeps at most 64 MiB that came too early
constexpr size_t kAckEvery = 16;     // packets, or when the next tick comes
constexpr auto kAckDelay = std::chrono::milliseconds(1);
constexpr uint64_t kQuantum = 16;  // pieces of one transfer before the next has its turn
// Packets that leave their buffers at a tick, so that the other channels do not wait for the
// copies.
constexpr size_t kMostMovedOut = 32;
// Number of transfers and answers that may wait to leave, before requests of the peer are refused.
// An honest peer has fewer under way.
constexpr size_t kMostBulk = 65536;

}  // namespace

// Holds the packet and the channel until the card is done with it. That it came through the peer
// says, not the card.
class FabricChannel::SendPacket final : public RailOperation {
 public:
  SendPacket(std::shared_ptr<FabricChannel> channel, std::shared_ptr<OutPacket> packet, size_t path,
             RailPeer peer)
      : channel_(std::move(channel)),
        packet_(std::move(packet)),
        path_(path),
        peer_(peer),
        epoch_(channel_->epoch_) {
    packet_->enterCard();
  }
  ~SendPacket() override {
    if (packet_) packet_->leaveCard();
  }

  Status begin(Nic& nic) override {
    return nic.send(peer_.number,
                    channel_->rails_->pool().as(path_, packet_->data(), packet_->length), {}, this);
  }
  void end(const NicCompletion& how) override {
    // Else the buffer would be another packet's while the card may still send from it.
    if (!how.abandoned) std::exchange(packet_, nullptr)->leaveCard();
    if (how.error != NicError::kNone) channel_->onSendFailed(path_, epoch_, how);
  }
  RailShare& share() const override { return channel_->operations_; }
  uint64_t generation() const override { return peer_.generation; }

 private:
  const std::shared_ptr<FabricChannel> channel_;
  std::shared_ptr<OutPacket> packet_;
  const size_t path_;
  const RailPeer peer_;
  const uint64_t epoch_;
};

// ---- how they leave

void FabricChannel::activate() {
  if (isActive_ || closed_) return;
  isActive_ = true;
  rails_->activate(shared_from_this());
}

void FabricChannel::pump(Clock::time_point now) {
  if (!below_ || !theirs_ || lost_ || closed_) return;
  if (!unmoved_.empty()) moveOn(now);
  if (sent_.waiting() > 0) sendAgain(now);
  const size_t window = std::min(kMostWindow, kWindow * std::max<size_t>(1, paths_.up()));
  while (sent_.size() < window && (!puts_.empty() || !bulk_.empty())) {
    // In turn: neither waits for all of the other.
    isBulksTurn_ = bulk_.empty() ? false : puts_.empty() || !isBulksTurn_;
    if (!sendNext(isBulksTurn_ ? bulk_ : puts_, now)) break;
  }
  if (!sent_.empty() || !puts_.empty() || !bulk_.empty() || !unmoved_.empty()) activate();
}

// What both ends have buffers for.
size_t FabricChannel::packetBytes() const {
  return theirs_ ? std::min<size_t>(theirs_->packetBytes, rails_->packetBytes())
                 : rails_->packetBytes();
}

// One piece of the first one. False: there is no path, or no buffer.
bool FabricChannel::sendNext(std::deque<Stream>& streams, Clock::time_point now) {
  Stream& stream = streams.front();
  const bool isOneOfFew = puts_.size() + bulk_.size() < paths_.count();
  const bool isSplit = stream.packet.length >= splitBytes(isOneOfFew);
  auto path = stream.path;
  if (isSplit || !path || !paths_.isUp(*path)) path = paths_.choose(stream.turn + stream.pieces);
  if (!path) return false;
  const auto packet = OutPacket::make(rails_->pool().buffers(), buffers_);
  if (!packet) return false;  // the next tick tries again
  stream.path = path;
  const uint64_t serial = ++lastSerial_;
  bool isLast = false;
  packet->length = fill(stream, {packet->data(), packetBytes()}, serial, isLast);
  sent_.add(serial,
            {.packet = packet,
             .path = *path,
             .kind = stream.packet.kind,
             .status = stream.packet.status,
             .number = stream.packet.number},
            now);
  if (isLast) {
    if (stream.packet.kind == Packet::Kind::kAnswer) --answering_;
    queuedBytes_ -= stream.owned.size();
    streams.pop_front();
  } else if (&streams == &bulk_ && stream.pieces % kQuantum == 0 && streams.size() > 1) {
    bulk_.push_back(std::move(stream));
    bulk_.pop_front();
  }
  if (!submit(*path, packet)) leaveOut(*path, now, "the peer's card has no address here");
  return true;
}

// The next piece of it, into `out`; its length.
size_t FabricChannel::fill(Stream& stream, std::span<std::byte> out, uint64_t serial,
                           bool& isLast) {
  using Kind = Packet::Kind;
  Packet packet = stream.packet;
  packet.incarnation = theirs_ ? theirs_->incarnation : 0;
  packet.serial = serial;
  packet.acked = serials_.below();
  if (serials_.above().empty()) ackOwed_ = 0;
  ++stream.pieces;
  const bool hasData =
      packet.kind == Kind::kPut || packet.kind == Kind::kAnswer || packet.kind == Kind::kWrite;
  const uint64_t piece =
      hasData && packet.status == Packet::Status::kOk
          ? std::min<uint64_t>(packet.length - packet.position, out.size() - Packet::kBytes)
          : 0;
  RegionTable::Use use;
  const std::byte* from = nullptr;
  if (packet.kind == Kind::kAnswer && packet.status == Packet::Status::kOk) {
    use = context_.regions.open(stream.key, stream.offset, packet.length, kRemoteRead);
    from = use ? use.data() + packet.position : nullptr;
    if (!use) packet.status = Packet::Status::kRefused;
  } else if (piece > 0) {
    from = stream.data.empty() ? stream.owned.data() + (packet.position - stream.ownedFrom)
                               : stream.data.data() + packet.position;
  }
  if (packet.kind == Kind::kAnswer && packet.status != Packet::Status::kOk) {
    packet.length = packet.position = 0;
    isLast = true;
    packet.encode(out.first<Packet::kBytes>());
    return Packet::kBytes;
  }
  packet.encode(out.first<Packet::kBytes>());
  if (piece > 0) std::memcpy(out.data() + Packet::kBytes, from, piece);
  stream.packet.position += piece;
  isLast =
      !hasData || packet.status != Packet::Status::kOk || stream.packet.position == packet.length;
  return Packet::kBytes + piece;
}

// False: the peer's card cannot be addressed.
bool FabricChannel::submit(size_t path, const std::shared_ptr<OutPacket>& packet) {
  const auto peer = peerAt(path);
  if (!peer) return false;
  rails_->submit(path, std::make_unique<SendPacket>(shared_from_this(), packet, path, *peer));
  return true;
}

std::optional<RailPeer> FabricChannel::peerAt(size_t path) {
  auto& peer = peers_[path];
  if (peer && peer->generation == rails_->generation(path)) return peer;
  peer.reset();
  const auto inserted =
      (*rails_)[path].insert(theirs_->rails[path % theirs_->rails.size()].address);
  if (inserted.ok()) peer = *inserted;
  return peer;
}

void FabricChannel::sendAgain(Clock::time_point now) {
  uint64_t from = 0;
  while (const auto serial = sent_.firstWaiting(from)) {
    const auto path = paths_.choose(turn_++);
    if (!path || !sent_.at(*serial).packet->moveIn()) return;  // the next tick tries again
    const auto packet = sent_.moveTo(*path, *serial, now).packet;
    if (!submit(*path, packet)) leaveOut(*path, now, "the peer's card has no address here");
    from = *serial + 1;
  }
}

// The buffers of a peer that acknowledges nothing serve other peers. Where it has only been slow, a
// packet takes one again when it leaves once more.
void FabricChannel::moveSentOut(Clock::time_point now) {
  if (sent_.empty() || now - sent_.progress() < options_.stallLimit / 4) return;
  size_t moved = 0;
  for (const auto& [serial, sent] : sent_) {
    if (moved == kMostMovedOut) return;
    moved += sent.packet->moveOut();
  }
}

// Without a serial: nothing waits for it. False: there is no buffer for it.
bool FabricChannel::sendPlain(Packet packet, size_t path, const std::vector<uint64_t>& numbers) {
  const auto out =
      theirs_ ? OutPacket::make(rails_->pool().buffers(), buffers_, /*isUrgent=*/true) : nullptr;
  if (!out) return false;
  packet.incarnation = theirs_->incarnation;
  packet.acked = serials_.below();
  packet.encode(std::span<std::byte, Packet::kBytes>(out->data(), Packet::kBytes));
  const size_t bytes =
      std::min(numbers.size() * sizeof(uint64_t), (packetBytes() - Packet::kBytes) / 8 * 8);
  if (bytes > 0) std::memcpy(out->data() + Packet::kBytes, numbers.data(), bytes);
  out->length = Packet::kBytes + bytes;
  (void)submit(path, out);
  return true;
}

void FabricChannel::onSendFailed(size_t path, uint64_t epoch, const NicCompletion& how) {
  std::lock_guard lock(mutex_);
  if (closed_ || lost_ || fenced_ || !theirs_ || epoch != epoch_) return;
  const auto now = Clock::now();
  leaveOut(path, now,
           how.error == NicError::kDevice ? "the card does not work"
                                          : "the card could not reach the peer's");
  pump(now);
  activate();
}

// What is on its way there leaves again over another one.
void FabricChannel::leaveOut(size_t path, Clock::time_point now, const std::string& why,
                             bool isAnew) {
  if (isAnew ? paths_.startAnew(path, now) : paths_.leaveOut(path, now))
    log(LogLevel::kInfo, options_.name, "card ", rails_->name(path),
        " is left out for a peer: ", why);
  sent_.holdBack(path, now);
  activate();
}

// ---- how they come through

void FabricChannel::owe(Clock::time_point now) {
  if (ackOwed_++ == 0) ackDue_ = now + kAckDelay;
  if (ackOwed_ >= kAckEvery) return sendAck();
  activate();
}

void FabricChannel::sendAck() {
  if (!theirs_ || lost_) return;
  const auto path = paths_.choose(turn_++);
  if (!path) return;  // when one comes back
  const auto& above = serials_.above();
  // Without a buffer the next tick tries again.
  if (sendPlain({.kind = Packet::Kind::kAck}, *path, {above.begin(), above.end()})) ackOwed_ = 0;
}

// Whether the packet has its place here, and counts from now on. One that does not breaks the
// rules: it is not acknowledged.
bool FabricChannel::admit(const Packet& packet, size_t dataBytes) {
  const bool asks = packet.kind == Packet::Kind::kGet || packet.kind == Packet::Kind::kWrite;
  const bool hasRoom =
      incoming_.hasRoomFor(packet, dataBytes) && (!asks || bulk_.size() < kMostBulk);
  if (hasRoom && serials_.add(packet.serial)) return true;
  if (bad_++ == 0)
    log(LogLevel::kError, options_.name, "a packet of kind ", int(packet.kind), ", number ",
        packet.number, " breaks the rules: do both ends run the same version?");
  return false;
}

void FabricChannel::onPacket(size_t rail, const Packet& packet, ByteView data) {
  std::lock_guard lock(mutex_);
  if (closed_ || packet.incarnation != incarnation_) return;
  received_.fetch_add(Packet::kBytes + data.size(), std::memory_order_relaxed);
  const auto now = Clock::now();
  std::vector<uint64_t> above;
  if (packet.kind == Packet::Kind::kAck) {
    above.resize(data.size() / sizeof(uint64_t));
    if (!above.empty()) std::memcpy(above.data(), data.data(), data.size());
  }
  sent_.acknowledge(packet.acked, above, now);
  switch (packet.kind) {
    case Packet::Kind::kAck:
      break;
    case Packet::Kind::kProbe:
      if (theirs_) sendPlain({.kind = Packet::Kind::kProbed, .number = packet.number}, rail);
      break;
    case Packet::Kind::kProbed:
      if (paths_.count() > 0) warmUp_.answered(paths_.pathOf(packet.number));
      if (const auto path = paths_.answered(packet.number, now)) {
        log(LogLevel::kInfo, options_.name, "card ", rails_->name(*path),
            " reaches its peer again");
        endWait({});
      }
      break;
    default:
      // Of who is out only what he has received counts.
      if (fenced_) break;
      if (serials_.has(packet.serial)) {
        owe(now);  // the peer has not heard of it
        break;
      }
      // Not acknowledged: it comes again.
      if (isHeld_ && heldPackets_.size() >= kMostWindow) break;
      if (!admit(packet, data.size())) break;
      if (isHeld_) {
        heldPackets_.emplace_back(packet, Bytes(data.begin(), data.end()));
      } else {
        land(packet, data);
      }
      owe(now);
  }
  pump(now);
}

// About every millisecond, while something is under way.
bool FabricChannel::tick(Clock::time_point now) {
  std::lock_guard lock(mutex_);
  isActive_ = false;
  if (closed_ || lost_ || !theirs_) return false;
  if (fenced_ && !onPath_) return false;  // no card has to reach the peer any more
  moveSentOut(now);
  for (const auto& probe : paths_.probes(now))
    sendPlain({.kind = Packet::Kind::kProbe, .number = probe.number}, probe.path);
  if (warmUp_.hasCallers()) askCold(now);
  if (ackOwed_ > 0 && now >= ackDue_) sendAck();
  const auto since = paths_.allOutSince();
  if (!paths_.stalled(now).empty() || (since && now - *since > options_.pathLimit)) ask(now);
  if (isHeldUp(now)) {
    breakOff("it has not taken what it asked for");
    return false;
  }
  isActive_ = true;  // pump() does not ask for what we say here
  pump(now);
  isActive_ = ackOwed_ > 0 || paths_.hasWork() || !puts_.empty() || !bulk_.empty() ||
              sent_.waiting() > 0 || warmUp_.hasCallers() || !unmoved_.empty() || heldUpSince_;
  return isActive_;
}

// ---- how they land

void FabricChannel::land(const Packet& packet, ByteView data) {
  switch (packet.kind) {
    case Packet::Kind::kPut:
      return incoming_.put(packet, data);
    case Packet::Kind::kGet:
      return answerGet(packet);
    case Packet::Kind::kAnswer:
      return takeAnswer(packet, data);
    case Packet::Kind::kWrite:
      if (const auto ended = incoming_.write(packet, data)) answerWrite(packet, *ended);
      return;
    case Packet::Kind::kWritten:
      if (packet.status == Packet::Status::kOk) {
        perhapsBreak();  // the completion is lost, the data has come
        return finish(packet.number, ErrorCode::kOk);
      }
      return finish(packet.number, packet.status == Packet::Status::kAborted ? ErrorCode::kAborted
                                                                             : ErrorCode::kRefused);
    default:
      return;
  }
}

void FabricChannel::answerGet(const Packet& get) {
  if (lost_) return;  // it asks again when the connection stands
  if (answering_ >= wire::kMaxTransfers) {
    ++bad_;
    return;
  }
  ++answering_;
  bulk_.push_back(
      {.packet = {.kind = Packet::Kind::kAnswer, .number = get.number, .length = get.length},
       .key = get.key,
       .offset = get.offset,
       .turn = turn_++});
}

void FabricChannel::answerWrite(const Packet& write, Packet::Status status) {
  if (lost_) return;
  bulk_.push_front(
      {.packet = {.kind = Packet::Kind::kWritten, .status = status, .number = write.number},
       .turn = turn_++});
}

// The peer's cards were asked to write it, and cannot.
std::map<uint64_t, FabricChannel::Transfer>::iterator FabricChannel::awaitPackets(uint64_t number) {
  const auto asked = moving_.find(number);
  if (asked == moving_.end() || asked->second->end) return transfers_.end();
  CardTransfer& transfer = *asked->second;
  if (!std::exchange(transfer.awaitsPeer, false)) return transfers_.end();
  return transfers_
      .emplace(
          number,
          Transfer{.target = transfer.memory, .completion = transfer.completion, .whole = number})
      .first;
}

void FabricChannel::takeAnswer(const Packet& answer, ByteView data) {
  auto found = transfers_.find(answer.number);
  if (found == transfers_.end()) found = awaitPackets(answer.number);
  if (found == transfers_.end()) return;  // it has ended
  if (answer.status != Packet::Status::kOk) {
    return finish(answer.number, answer.status == Packet::Status::kAborted ? ErrorCode::kAborted
                                                                           : ErrorCode::kRefused);
  }
  Transfer& get = found->second;
  if (answer.length != get.target.size() || data.size() > get.target.size() - get.arrived)
    return finish(answer.number, ErrorCode::kProtocol);
  if (!data.empty()) std::memcpy(get.target.data() + answer.position, data.data(), data.size());
  get.arrived += data.size();
  if (get.arrived < get.target.size()) return;
  perhapsBreak();
  finish(answer.number, ErrorCode::kOk);
}

}  // namespace mooncake
