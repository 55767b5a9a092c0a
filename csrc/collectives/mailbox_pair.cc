#include "collectives/mailbox_pair.h"

#include <algorithm>
#include <cstddef>

namespace mooncake {

// If the connection is broken, a put that fails here is made again by putAgain(). Only the status of
// a message is looked at.

bool MailboxPair::hasRoom() const {
  return sent_ - ours().taken.load(std::memory_order_acquire) < kMailboxCells;
}

MailboxCell& MailboxPair::next(MailboxCell& scratch) {
  ++sent_;
  if (isMapped()) return scratch;
  if (!kept_) kept_.reset(new MailboxCell[kMailboxCells]);
  return kept_[sent_ % kMailboxCells];
}

Status MailboxPair::put(const MailboxCell& cell) { return placeCell(sent_, cell); }

Status MailboxPair::placeCell(uint64_t number, const MailboxCell& cell) {
  constexpr size_t kStampEnd = offsetof(MailboxCell, arrived) + sizeof(MailboxCell::arrived);
  const size_t payload = cell.region.bytes == 0 ? cell.bytes : 0;
  const size_t place =
      there(offsetof(Mailbox, cells)) + (number % kMailboxCells) * sizeof(MailboxCell);
  return this->place(place + kStampEnd,
                     {reinterpret_cast<const std::byte*>(&cell) + kStampEnd,
                      kCellHeaderBytes - kStampEnd + payload},
                     place + offsetof(MailboxCell, arrived), number);
}

const MailboxCell* MailboxPair::arrived() const {
  const uint64_t number = taken_ + 1;
  const MailboxCell& cell = ours().cells[number % kMailboxCells];
  return cell.arrived.load(std::memory_order_acquire) < number ? nullptr : &cell;
}

void MailboxPair::giveBackCells() {
  if (!hasLeft_ && taken_ - credited_ >= kMailboxCells / 2) tellTaken();
}

void MailboxPair::tellTaken() {
  credited_ = taken_;
  const size_t word = there(offsetof(Mailbox, taken));
  (void)place(word, {}, word, taken_);
}

void MailboxPair::acknowledge(uint64_t number, bool isGone) {
  if (hasLeft_) return;
  acks_.push_back(number);
  putAcks(isGone);
}

void MailboxPair::putAcks(bool isGone) {
  if (hasLeft_ || isGone) {
    acks_.clear();
    acksPut_ = acksRead_;
    return;
  }
  const uint64_t read = ours().acksTaken.load(std::memory_order_acquire);
  for (; acksRead_ < read && !acks_.empty(); ++acksRead_) acks_.pop_front();
  acksPut_ = std::max(acksPut_, acksRead_);
  while (owes() && acksPut_ - acksRead_ < kMailboxAcks) {
    const uint64_t message = acks_[acksPut_ - acksRead_];
    const uint64_t number = ++acksPut_;
    const size_t place =
        there(offsetof(Mailbox, acks)) + (number % kMailboxAcks) * sizeof(MailboxAck);
    (void)this->place(place + offsetof(MailboxAck, message), std::as_bytes(std::span(&message, 1)),
                      place + offsetof(MailboxAck, arrived), number);
  }
}

void MailboxPair::dropAcks() {
  acks_.clear();
  acksRead_ = acksPut_ = 0;
}

void MailboxPair::takeAcks(const std::function<void(uint64_t)>& take) {
  for (;;) {
    const uint64_t number = acksTaken_ + 1;
    const MailboxAck& ack = ours().acks[number % kMailboxAcks];
    if (ack.arrived.load(std::memory_order_acquire) < number) return;
    take(ack.message);
    acksTaken_ = number;
    if (!hasLeft_ && acksTaken_ - acksCredited_ >= kMailboxAcks / 2) tellAcksTaken();
  }
}

void MailboxPair::tellAcksTaken() {
  acksCredited_ = acksTaken_;
  const size_t word = there(offsetof(Mailbox, acksTaken));
  (void)place(word, {}, word, acksTaken_);
}

void MailboxPair::putAgain(bool isGone) {
  const uint64_t taken = ours().taken.load(std::memory_order_acquire);
  for (uint64_t number = taken + 1; number <= sent_; ++number)
    (void)placeCell(number, kept_[number % kMailboxCells]);
  if (taken_ > 0 && !hasLeft_) tellTaken();
  if (acksTaken_ > 0 && !hasLeft_) tellAcksTaken();
  acksPut_ = acksRead_;
  putAcks(isGone);
}

// The part of ours that holds the peer's messages and its acknowledgements of our messages.
const Mailbox& MailboxPair::ours() const {
  return *reinterpret_cast<const Mailbox*>(window_.local() + mailboxOf(peer_));
}

// In the peer's part.
size_t MailboxPair::there(size_t offset) const { return mailboxOf(window_.rank()) + offset; }

Status MailboxPair::place(size_t offset, std::span<const std::byte> data, size_t stampOffset,
                          uint64_t stamp) {
  return window_.place(peer_, offset, data, {.offset = stampOffset, .stamp = stamp});
}

}  // namespace mooncake
