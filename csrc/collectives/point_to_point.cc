#include "collectives/point_to_point.h"

#include <cstring>
#include <utility>

namespace mooncake {
namespace {

// What may pile up here, per sender, of messages whose receive has not been called yet. Beyond it
// they stay in the mailbox and the sender waits.
constexpr size_t kEarlyBudget = 64 << 20;

}  // namespace

PointToPoint::PointToPoint(Group& group)
    : group_(group),
      turn_(group.window().bell()),
      pairs_(group.size()),
      outgoing_(new MailboxCell) {
  group_.watchRenewals([this](int rank) { onRenewed(rank); });
}

// After abort() the group may be gone.
PointToPoint::~PointToPoint() {
  if (aborted_.ok()) group_.watchRenewals(nullptr);
}

std::shared_ptr<Message> PointToPoint::send(std::span<const std::byte> data, int to, uint32_t tag,
                                            Deadline deadline) {
  // The receiver of a large message reads through this span, nobody writes.
  const std::span<std::byte> bytes(const_cast<std::byte*>(data.data()), data.size());
  return post(std::shared_ptr<Message>(new Message(true, to, tag, bytes, deadline)));
}

std::shared_ptr<Message> PointToPoint::receive(std::span<std::byte> data, int from, uint32_t tag,
                                               Deadline deadline) {
  return post(std::shared_ptr<Message>(new Message(false, from, tag, data, deadline)));
}

std::shared_ptr<Message> PointToPoint::post(std::shared_ptr<Message> message) {
  std::lock_guard lock(turn_);
  if (!aborted_.ok()) {
    end(*message, aborted_);
  } else if (auto usable = group_.usable(); !usable.ok()) {
    end(*message, std::move(usable));  // before anything is sent
  } else {
    group_.engine().stir();
    active_.push_back(message);
    progressLocked();
  }
  return message;
}

void PointToPoint::abort(Error why) {
  group_.watchRenewals(nullptr);  // before the lock, which a watcher takes
  std::lock_guard lock(turn_);
  aborted_ = std::move(why);
  for (auto& message : active_) {
    if (message->fetch_) group_.window().cancelGets(*message->fetch_);
    end(*message, aborted_);
  }
  active_.clear();
  group_.window().bell().ring();
}

bool PointToPoint::wait(const Message& message, Deadline deadline) {
  if (message.finished()) return true;
  drivers_.fetch_add(1, std::memory_order_relaxed);
  const bool finished = drive(message, deadline);
  drivers_.fetch_sub(1, std::memory_order_relaxed);
  return finished;
}

bool PointToPoint::drive(const Message& message, Deadline deadline) {
  Waiter waiter = group_.waiter(deadline.earlier(message.deadline()));
  const auto look = [&] {
    if (message.finished()) return true;
    // Somebody else is at it: it rings when our message moved, and when it lets go.
    if (std::unique_lock lock(turn_, std::try_to_lock); lock) progressLocked();
    return message.finished();
  };
  for (;;) {
    const auto how = waiter.until(look);
    if (how == WaitResult::kReady) return true;
    if (how == WaitResult::kInterrupted) waiter.generation = waiter.interrupt.generation();
    progress();  // ends what cannot end well any more
    if (message.finished()) return true;
    if (how == WaitResult::kTimeout && deadline.passed()) return false;
  }
}

bool PointToPoint::progress() {
  std::lock_guard lock(turn_);
  return progressLocked();
}

bool PointToPoint::progressLocked() {
  if (active_.empty()) return true;
  // What has arrived is taken in before anything is matched, and then messages are looked at in the
  // order of the calls: so an earlier receive takes the earlier message, and a send that cannot
  // move holds back the later ones to the same rank.
  for (const auto& message : active_) {
    // Who is gone is asked before the look at what it left: its last signals come before its end,
    // so a message that does not move in this round and whose peer had ended before will never.
    if (message->peer_ != kAnySource) pairs_[message->peer_].isGone = group_.isGone(message->peer_);
    if (message->isSend_ || message->fetch_) continue;
    for (int from = message->firstSource(); from <= message->lastSource(group_.size()); ++from)
      pairs_[from].wanted = true;
  }
  for (int from = 0; from < group_.size(); ++from) {
    pairs_[from].sendsHeld = false;
    if (std::exchange(pairs_[from].wanted, false) && from != group_.rank()) takeIn(from);
  }

  bool moved = false;
  for (auto it = active_.begin(); it != active_.end();) {
    Message& message = **it;
    if (!(message.isSend_ ? advanceSend(message) : advanceReceive(message))) endLate(message);
    if (message.finished()) {
      it = active_.erase(it);
      moved = true;
    } else {
      ++it;
    }
  }
  if (moved) group_.window().bell().ring();
  return active_.empty();
}

// True when the message is finished.
bool PointToPoint::advanceSend(Message& message) {
  Pair& pair = pairs_[message.peer_];
  const Mailbox& answers = mailboxOf(message.peer_);
  if (message.number_ != 0) {
    if (message.ack_ == kNoAck ||
        answers.acks[message.ack_].load(std::memory_order_acquire) < message.number_)
      return false;
    pair.ackBusy[message.ack_] = false;
    end(message, {});
    return true;
  }
  // The memory of who is gone may be there still, with free cells in it.
  if (pair.sendsHeld || pair.isGone) return false;
  pair.sendsHeld = true;  // until it has a cell
  if (pair.sent - answers.taken.load(std::memory_order_acquire) >= kMailboxCells) return false;
  const bool isLarge = message.data_.size() > kCellPayload;
  if (isLarge) {
    uint32_t ack = 0;
    while (ack < kMailboxAcks && pair.ackBusy[ack]) ++ack;
    if (ack == kMailboxAcks) return false;
    auto region =
        group_.engine().regions().add(message.data_.data(), message.data_.size(), kRemoteRead);
    if (!region.ok()) {
      end(message, region.error());
      return true;
    }
    message.region_ = std::move(*region);
    message.ack_ = ack;
    pair.ackBusy[ack] = true;
  }

  pair.sendsHeld = false;
  message.number_ = ++pair.sent;
  const size_t payload = isLarge ? 0 : message.data_.size();
  MailboxCell& cell = outgoing(message.peer_, message.number_);
  cell.tag = message.tag_;
  cell.ack = message.ack_;
  cell.bytes = message.data_.size();
  cell.region = message.region_.remote();
  if (payload) std::memcpy(cell.payload, message.data_.data(), payload);
  auto placed = placeCell(message.peer_, message.number_, cell);
  // It goes again when the connection is made again.
  if (placed.code() == ErrorCode::kPeerLost && !group_.isGone(message.peer_)) placed = {};
  if (!placed.ok()) {
    end(message, Error{placed.code(), "send to " + group_.nameRank(message.peer_) + ": " +
                                          placed.error().message});
    return true;
  }
  if (!isLarge) end(message, {});
  return !isLarge;
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
void PointToPoint::onRenewed(int rank) {
  std::lock_guard lock(turn_);
  if (!aborted_.ok() || group_.window().peerPtr(rank)) return;
  Pair& pair = pairs_[rank];
  ++pair.renewals;
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

// True when the message is finished.
bool PointToPoint::advanceReceive(Message& message) {
  if (message.fetch_) {
    if (!message.fetch_->finished()) return false;
    const ErrorCode code = message.fetch_->error.load(std::memory_order_acquire);
    if (code == ErrorCode::kOk) {
      acknowledge(message.peer_, message.ack_, message.number_);
      end(message, {});
    } else if (code == ErrorCode::kPeerLost && !group_.isGone(message.peer_)) {
      // Its connection broke, and may be made again; it may have been since we began.
      return pairs_[message.peer_].renewals != message.renewals_ && fetch(message);
    } else {
      end(message,
          Error{ErrorCode::kPeerLost, "fetching a message of " + group_.nameRank(message.peer_) +
                                          " failed (" + errorCodeName(code) + ")"});
    }
    return true;
  }
  for (int from = message.firstSource(); from <= message.lastSource(group_.size()); ++from) {
    Pair& pair = pairs_[from];
    for (auto early = pair.early.begin(); early != pair.early.end(); ++early) {
      if (early->tag != message.tag_) continue;
      if (early->bytes != message.data_.size()) {
        // The message stays: a receive of the right size can still take it.
        end(message,
            Error{ErrorCode::kInvalidArgument,
                  group_.nameRank(from) + " sent a message of " + std::to_string(early->bytes) +
                      " bytes with tag " + std::to_string(message.tag_) +
                      ", but the tensor to receive it has " + std::to_string(message.data_.size()) +
                      " bytes"});
        return true;
      }
      message.peer_ = from;
      const bool finished = takeEarly(message, *early);
      pair.earlyBytes -= early->payload.size();
      pair.early.erase(early);
      giveBackCells(from);
      return finished;
    }
  }
  return false;
}

bool PointToPoint::takeEarly(Message& message, const Early& early) {
  if (early.ack == kNoAck) {
    if (early.bytes) std::memcpy(message.data_.data(), early.payload.data(), early.bytes);
    end(message, {});
    return true;
  }
  message.number_ = early.number;
  message.ack_ = early.ack;
  message.source_ = early.region;
  return fetch(message);
}

bool PointToPoint::fetch(Message& message) {
  message.renewals_ = pairs_[message.peer_].renewals;
  message.fetch_ = std::make_unique<Completion>(&group_.window().bell());
  auto started =
      group_.window().get(message.peer_, message.source_, 0, message.data_, *message.fetch_);
  if (started.code() == ErrorCode::kPeerLost) {
    message.fetch_->error.store(ErrorCode::kPeerLost);
  } else if (!started.ok()) {
    end(message, Error{started.code(), "receive from " + group_.nameRank(message.peer_) + ": " +
                                           started.error().message});
    return true;
  }
  return advanceReceive(message);  // where memory can be read the data is there already
}

// Takes what has arrived from a rank out of its mailbox.
void PointToPoint::takeIn(int from) {
  Pair& pair = pairs_[from];
  const Mailbox& mailbox = mailboxOf(from);
  while (pair.earlyBytes <= kEarlyBudget) {
    const uint64_t number = pair.taken + 1;
    const MailboxCell& cell = mailbox.cells[number % kMailboxCells];
    if (cell.arrived.load(std::memory_order_acquire) < number) return;
    Early early{number, cell.tag, cell.ack, cell.bytes, cell.region, {}};
    const bool isLarge = early.bytes > kCellPayload;
    // What the cell says must be possible before anything is done with it.
    if (isLarge ? early.ack >= kMailboxAcks || early.region.bytes < early.bytes
                : early.ack != kNoAck) {
      group_.fail(
          {ErrorCode::kProtocol, group_.nameRank(from) + " sent a message that does not decode"});
      return;
    }
    if (!isLarge) early.payload.assign(cell.payload, cell.payload + early.bytes);
    pair.taken = number;
    pair.earlyBytes += early.payload.size();
    pair.early.push_back(std::move(early));
    giveBackCells(from);
  }
}

// Tells the sender how many cells are free again, half a mailbox at a time.
void PointToPoint::giveBackCells(int from, uint64_t atLeast) {
  Pair& pair = pairs_[from];
  if (pair.taken - pair.credited < atLeast) return;
  pair.credited = pair.taken;
  const size_t word = group_.layout().mailbox(group_.rank()) + offsetof(Mailbox, taken);
  (void)place(from, word, {}, word,
              pair.taken);  // over a broken connection: again when it is made again
}

void PointToPoint::acknowledge(int to, uint32_t ack, uint64_t number) {
  pairs_[to].acked[ack] = number;
  const size_t word =
      group_.layout().mailbox(group_.rank()) + offsetof(Mailbox, acks) + ack * sizeof(uint64_t);
  (void)place(to, word, {}, word,
              number);  // over a broken connection: again when it is made again
}

// A message that did not move: has it any chance left?
void PointToPoint::endLate(Message& message) {
  const char* what = message.isSend_ ? "send to " : "receive from ";
  const std::string title = what + (message.peer_ == kAnySource ? std::string("any rank")
                                                                : group_.nameRank(message.peer_));
  if (auto usable = group_.usable(); !usable.ok()) {
    if (message.fetch_) group_.window().cancelGets(*message.fetch_);
    end(message, usable);
    return;
  }
  if (message.peer_ != kAnySource) {
    if (pairs_[message.peer_].isGone) {
      if (message.fetch_) group_.window().cancelGets(*message.fetch_);
      end(message, Error{ErrorCode::kPeerLost, title + ": " + group_.whyGone(message.peer_)});
      return;
    }
  }
  if (message.deadline_.passed()) {
    if (message.fetch_) group_.window().cancelGets(*message.fetch_);
    end(message,
        Error{ErrorCode::kTimeout, title + " timed out: the other side did not " +
                                       (message.isSend_ ? "receive" : "send") +
                                       " a message with tag " + std::to_string(message.tag_)});
  }
}

void PointToPoint::end(Message& message, Status status) {
  // Connections end with the group, and a fetch may be the first to find that.
  if (const Status usable = group_.usable(); !usable.ok() && !status.ok()) status = usable;
  message.region_ = MemoryRegion();
  message.status_ = std::move(status);
  message.finished_.store(true, std::memory_order_release);
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
