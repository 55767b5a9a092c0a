// What goes through the mailboxes: how a message gets into the peer's, and out of ours.
#include <cstring>
#include <utility>

#include "collectives/point_to_point.h"

namespace mooncake {
namespace {

// What may pile up here, per sender, of messages whose receive has not been called yet. Beyond it
// they stay in the mailbox and the sender waits.
constexpr size_t kEarlyBudget = 64 << 20;

CellKind cellKindOf(Message::Kind kind) {
  if (kind == Message::Kind::kPut) return CellKind::kPut;
  return kind == Message::Kind::kSignal ? CellKind::kSignal : CellKind::kMessage;
}

}  // namespace

// True when the message is finished.
bool PointToPoint::advanceSend(Message& message) {
  Pair& pair = pairs_[message.peer_];
  const Mailbox& answers = mailboxOf(message.peer_);
  if (message.number_ != 0) {
    if (!isAcknowledged(message)) return false;
    end(message, {});
    return true;
  }
  // The memory of who is gone may be there still, with free cells in it.
  if (pair.sendsHeld || pair.isGone || pair.left) return false;
  pair.sendsHeld = true;  // until it has a cell
  if (pair.sent - answers.taken.load(std::memory_order_acquire) >= kMailboxCells) return false;
  const bool isLarge = message.data_.size() > kCellPayload;
  if (isLarge && !announce(message)) return message.finished();

  pair.sendsHeld = false;
  message.number_ = ++pair.sent;
  if (isLarge) pair.awaited[message.ack_] = message.number_;
  const size_t payload = isLarge ? 0 : message.data_.size();
  MailboxCell& cell = outgoing(message.peer_, message.number_);
  cell.tag = message.tag_;
  cell.ack = message.ack_;
  cell.bytes = message.data_.size();
  cell.region = message.region_.remote();
  cell.offset = message.offset_;
  cell.kind = cellKindOf(message.kind_);
  if (payload) std::memcpy(cell.payload, message.data_.data(), payload);
  auto placed = placeCell(message.peer_, message.number_, cell);
  // It goes again when the connection is made again.
  if (placed.code() == ErrorCode::kPeerLost && !group_.isGone(message.peer_)) placed = {};
  if (!placed.ok()) {
    end(message, Error{placed.code(), titleOf(message) + ": " + placed.error().message});
    return true;
  }
  if (!isLarge) end(message, {});
  return !isLarge;
}

// Registers what the other side shall fetch. False: no word for its acknowledgement is free, or the
// message has ended with an error.
bool PointToPoint::announce(Message& message) {
  const Pair& pair = pairs_[message.peer_];
  const Mailbox& answers = mailboxOf(message.peer_);
  uint32_t ack = 0;
  while (ack < kMailboxAcks &&
         answers.acks[ack].load(std::memory_order_acquire) < pair.awaited[ack])
    ++ack;
  if (ack == kMailboxAcks) return false;
  auto region =
      group_.engine().regions().add(message.data_.data(), message.data_.size(), kRemoteRead);
  if (!region.ok()) {
    end(message, region.error());
    return false;
  }
  message.region_ = std::move(*region);
  message.ack_ = ack;
  return true;
}

// Where a message is made. What is sent over a connection is kept there: its cell is used again
// when the peer has taken it.
MailboxCell& PointToPoint::outgoing(int to, uint64_t number) {
  if (group_.window().peerPtr(to)) return *outgoing_;
  auto& kept = pairs_[to].kept;
  if (!kept) kept.reset(new MailboxCell[kMailboxCells]);
  return kept[number % kMailboxCells];
}

Status PointToPoint::placeCell(int to, uint64_t number, const MailboxCell& cell) {
  constexpr size_t kStampEnd = offsetof(MailboxCell, arrived) + sizeof(MailboxCell::arrived);
  const size_t payload = cell.ack == kNoAck ? cell.bytes : 0;
  const size_t there = group_.layout().mailbox(group_.rank()) + offsetof(Mailbox, cells) +
                       (number % kMailboxCells) * sizeof(MailboxCell);
  return place(to, there + kStampEnd,
               {reinterpret_cast<const std::byte*>(&cell) + kStampEnd,
                kCellHeaderBytes - kStampEnd + payload},
               there + offsetof(MailboxCell, arrived), number);
}

// Whatever we have said to the rank that it may not have heard is said again. Should the connection
// break meanwhile, this is called again.
void PointToPoint::onReconnected(int rank) {
  std::lock_guard lock(progressLock_);
  if (!aborted_.ok() || group_.window().peerPtr(rank)) return;
  Pair& pair = pairs_[rank];
  ++pair.reconnections;
  oneSided_.onReconnected(rank);
  const uint64_t taken = mailboxOf(rank).taken.load(std::memory_order_acquire);
  for (uint64_t number = taken + 1; number <= pair.sent; ++number)
    (void)placeCell(rank, number, pair.kept[number % kMailboxCells]);
  if (pair.taken > 0) giveBackCells(rank, 0);
  for (uint32_t ack = 0; ack < kMailboxAcks; ++ack) {
    if (pair.acked[ack] > 0) acknowledge(rank, ack, pair.acked[ack]);
  }
  progressLocked();
  group_.window().bell().ring();
}

// Takes what has arrived from a rank out of its mailbox.
void PointToPoint::takeIn(int from) {
  Pair& pair = pairs_[from];
  const Mailbox& mailbox = mailboxOf(from);
  while (pair.earlyBytes + oneSided_.heldBytes(from) <= kEarlyBudget) {
    const uint64_t number = pair.taken + 1;
    const MailboxCell& cell = mailbox.cells[number % kMailboxCells];
    if (cell.arrived.load(std::memory_order_acquire) < number) return;
    if (!takeOne(from, number, cell)) {
      group_.fail(
          {ErrorCode::kProtocol, group_.nameRank(from) + " sent a message that does not decode"});
      return;
    }
    pair.taken = number;
    giveBackCells(from);
  }
}

// False: what the cell says cannot be. Each field is read once, into memory of ours: the sender's
// may still change.
bool PointToPoint::takeOne(int from, uint64_t number, const MailboxCell& cell) {
  Pair& pair = pairs_[from];
  const CellKind kind = cell.kind;
  Early early{number, cell.tag, cell.ack, cell.bytes, cell.region, {}};
  const bool isLarge = early.bytes > kCellPayload;
  if (isLarge ? early.ack >= kMailboxAcks || early.region.bytes < early.bytes : early.ack != kNoAck)
    return false;
  if (!isLarge) early.payload.assign(cell.payload, cell.payload + early.bytes);
  switch (kind) {
    case CellKind::kMessage:
      pair.earlyBytes += early.payload.size();
      pair.early.push_back(std::move(early));
      return true;
    case CellKind::kPut:
    case CellKind::kSignal:
      return oneSided_.take(from, {kind, early.tag, number, early.ack, early.bytes, cell.offset,
                                   early.region, std::move(early.payload)});
  }
  return false;
}

// Tells the sender how many cells are free again, half a mailbox at a time.
void PointToPoint::giveBackCells(int from, uint64_t atLeast) {
  Pair& pair = pairs_[from];
  if (pair.left || pair.taken - pair.credited < atLeast) return;
  pair.credited = pair.taken;
  const size_t word = group_.layout().mailbox(group_.rank()) + offsetof(Mailbox, taken);
  (void)place(from, word, {}, word,
              pair.taken);  // over a broken connection: again when it is made again
}

void PointToPoint::acknowledge(int to, uint32_t ack, uint64_t number) {
  if (pairs_[to].left) return;  // its memory may be gone
  pairs_[to].acked[ack] = number;
  const size_t word =
      group_.layout().mailbox(group_.rank()) + offsetof(Mailbox, acks) + ack * sizeof(uint64_t);
  (void)place(to, word, {}, word,
              number);  // over a broken connection: again when it is made again
}

// Our last word in this group, by a message: the memory of others may be gone when we leave. Should
// it be lost with its connection, they wait for the timeouts of their messages.
void PointToPoint::sayThatWeLeft() {
  for (int r = 0; r < group_.size(); ++r) {
    const auto& peer = group_.window().peer(r);
    if (!peer || group_.isGone(r)) continue;
    ByteWriter last;
    last.put(pairs_[r].sent);
    for (const uint64_t acked : pairs_[r].acked) last.put(acked);
    (void)group_.engine().send(*peer, group_.topic() + 1, last.take());
  }
}

// On the loop's thread.
void PointToPoint::onLeft(const EngineId& from, ByteView message) {
  ByteReader in(message);
  Left last;
  last.sent = in.get<uint64_t>();
  for (uint64_t& acked : last.acked) acked = in.get<uint64_t>();
  if (!in.finish("").ok()) return;
  std::lock_guard lock(progressLock_);
  for (int r = 0; r < group_.size(); ++r) {
    if (const auto& peer = group_.window().peer(r); peer && peer->id == from) pairs_[r].left = last;
  }
  progressLocked();
  group_.window().bell().ring();
}

// The rank has left the group, and all that it sent has been taken in here: puts may come later
// than a message.
bool PointToPoint::hasSentAll(int rank) const {
  const Pair& pair = pairs_[rank];
  return pair.left && pair.taken >= pair.left->sent && !oneSided_.holdsBack(rank);
}

bool PointToPoint::isAcknowledged(const Message& message) const {
  if (message.ack_ == kNoAck) return false;
  const auto& left = pairs_[message.peer_].left;
  const auto& word = mailboxOf(message.peer_).acks[message.ack_];
  return word.load(std::memory_order_acquire) >= message.number_ ||
         (left && left->acked[message.ack_] >= message.number_);
}

// Messages from the rank, and what it says about ours to it: both lie in our part.
const Mailbox& PointToPoint::mailboxOf(int from) const {
  return *reinterpret_cast<const Mailbox*>(group_.window().local() + group_.layout().mailbox(from));
}

Status PointToPoint::place(int to, size_t offset, std::span<const std::byte> data,
                           size_t stampOffset, uint64_t stamp) {
  return group_.window().place(to, offset, data, {.offset = stampOffset, .stamp = stamp});
}

}  // namespace mooncake
