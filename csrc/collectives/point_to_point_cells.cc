// The mailboxes: how a message gets into the peer's, and out of ours.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/failpoint.h"
#include "base/mutex.h"
#include "collectives/point_to_point.h"

namespace mooncake {
namespace {

// Bytes per sender that may pile up here: messages for which no receive was called yet, and
// acknowledgements that the sender has not read. Beyond this, messages stay in the mailbox and the
// sender waits.
constexpr size_t kEarlyBudget = 64 << 20;

CellKind cellKindOf(Message::Kind kind) {
  if (kind == Message::Kind::kPut) return CellKind::kPut;
  return kind == Message::Kind::kSignal ? CellKind::kSignal : CellKind::kMessage;
}

}  // namespace

// True when the message is finished.
bool PointToPoint::advanceSend(Message& message) {
  MessagePair& pair = pairs_[message.peer_];
  if (message.number_ != 0) {
    if (!message.isAcknowledged_)
      pair.mailboxes.takeAcks([&](uint64_t number) { pair.noteAcknowledged(number); });
    if (!message.isAcknowledged_) return false;
    end(message, {});
    return true;
  }
  // A lost rank's mailbox may still be mapped and may still show free cells.
  if (pair.sendsHeld || pair.isGone || pair.left) return false;
  if (message.kind_ == Message::Kind::kSend && !findData(message)) return message.finished();
  pair.sendsHeld = true;  // until it has a cell
  if (!pair.mailboxes.hasRoom()) return false;
  const size_t bytes = message.data_.size();
  const bool waitsForReceive = untilReceived_ && message.kind_ == Message::Kind::kSend && bytes > 0;
  const bool isLarge = bytes > kCellPayload || waitsForReceive;
  if (isLarge && !announce(message)) return message.finished();

  pair.sendsHeld = false;
  MailboxCell& cell = pair.mailboxes.next(*scratch_);
  message.number_ = pair.mailboxes.sent();
  if (isLarge) pair.announced.emplace(message.number_, &message);
  const size_t payload = isLarge ? 0 : bytes;
  cell.tag = message.tag_;
  cell.bytes = bytes;
  cell.region = message.region_.remote();
  cell.offset = message.offset_;
  cell.kind = cellKindOf(message.kind_);
  if (payload) std::memcpy(cell.payload, message.data_.data(), payload);
  auto placed = pair.mailboxes.put(cell);
  // The cell is put again after a reconnect.
  if (placed.code() == ErrorCode::kPeerLost && !group().isGone(message.peer_)) placed = {};
  if (!placed.ok()) {
    end(message, Error{placed.code(), titleOf(message) + ": " + placed.error().message});
    return true;
  }
  failpoint("message-announced");
  if (!isLarge) end(message, {});
  return !isLarge;
}

// True if the data of a send is there, and no earlier send with its tag waits. False: it waits, or has
// ended with an error.
bool PointToPoint::findData(Message& message) {
  std::vector<uint32_t>& held = pairs_[message.peer_].tagsHeld;
  if (std::ranges::find(held, message.tag_) != held.end()) return false;
  if (!message.hasData_) return true;
  const auto isThere = message.hasData_();
  if (!isThere.ok()) {
    end(message, Error{isThere.error().code, titleOf(message) + ": " + isThere.error().message});
    return false;
  }
  if (*isThere) {
    failpoint("message-data");
    message.hasData_ = nullptr;
    return true;
  }
  held.push_back(message.tag_);
  awaitsData_ = true;
  return false;
}

// Registers the data for the other side to fetch. False: the message has ended with an error, or it
// waits for room in the table of regions.
bool PointToPoint::announce(Message& message) {
  RegionTable& regions = group().engine().regions();
  const MessageDevice& device = message.device_;
  auto region = device.owner ? regions.addOffered(message.data_, device.owner, device.offer)
                             : regions.add(message.data_.data(), message.data_.size(), kRemoteRead);
  // Tried again when other messages have ended.
  if (!region.ok() && region.error().code == ErrorCode::kExhausted) return false;
  if (!region.ok()) {
    end(message, region.error());
    return false;
  }
  message.region_ = std::move(*region);
  return true;
}

// Puts again all that the rank may lack. If the connection breaks meanwhile, this is called again.
void PointToPoint::onReconnected(int rank) {
  Guard lock(progressLock_);
  if (!aborted_.ok() || pairs_[rank].mailboxes.isMapped()) return;
  MessagePair& pair = pairs_[rank];
  ++pair.reconnections;
  oneSided_.onReconnected(rank);
  pair.mailboxes.putAgain(group().isGone(rank));
  if (pair.mailboxes.owes()) owes_ = true;
  progressLocked();
  ring();
}

// Takes the messages that have arrived from a rank out of its mailbox.
void PointToPoint::takeIn(int from) {
  MessagePair& pair = pairs_[from];
  const auto held = [&]() REQUIRES(progressLock_) {
    return pair.earlyBytes + oneSided_.heldBytes(from) +
           pair.mailboxes.unread().size() * sizeof(uint64_t);
  };
  while (held() <= kEarlyBudget) {
    const MailboxCell* const cell = pair.mailboxes.arrived();
    if (!cell) return;
    if (!takeOne(from, *cell)) {
      group().fail(
          {ErrorCode::kProtocol, group().nameRank(from) + " sent a message that does not decode"});
      return;
    }
    pair.mailboxes.take();
    pair.mailboxes.giveBackCells();
  }
}

// Takes one message out of its cell. False: the content of the cell is invalid. Each field is read
// once, into our own memory, because the sender may still change the cell.
bool PointToPoint::takeOne(int from, const MailboxCell& cell) {
  MessagePair& pair = pairs_[from];
  const uint64_t number = pair.mailboxes.taken() + 1;
  const CellKind kind = cell.kind;
  EarlyMessage early{number, cell.tag, cell.bytes, cell.region, {}};
  if (early.bytes > kCellPayload && early.isWhole()) return false;
  if (!early.isWhole() && early.region.bytes < early.bytes) return false;
  if (early.isWhole()) early.payload.assign(cell.payload, cell.payload + early.bytes);
  switch (kind) {
    case CellKind::kMessage:
      pair.earlyBytes += early.heldBytes();
      pair.early.push_back(std::move(early));
      return true;
    case CellKind::kPut:
    case CellKind::kSignal:
      return oneSided_.take(from, {kind, early.tag, number, early.bytes, cell.offset, early.region,
                                   std::move(early.payload)});
  }
  return false;
}

void PointToPoint::acknowledge(int to, uint64_t number) {
  MailboxPair& mailboxes = pairs_[to].mailboxes;
  mailboxes.acknowledge(number, group().isGone(to));
  if (mailboxes.owes()) owes_ = true;
}

// True if the rank has left the group and all that it sent has been taken in here. A put may be
// fetched later than the messages after it are taken.
bool PointToPoint::hasSentAll(int rank) const {
  const MessagePair& pair = pairs_[rank];
  return pair.left && pair.mailboxes.taken() >= *pair.left && !oneSided_.holdsBack(rank);
}

}  // namespace mooncake
