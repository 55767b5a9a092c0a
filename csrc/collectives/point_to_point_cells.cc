// The mailboxes: how a message gets into the peer's. EarlyMessages takes it out of ours.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/failpoint.h"
#include "base/mutex.h"
#include "collectives/point_to_point.h"

namespace mooncake {
namespace {

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

void PointToPoint::acknowledge(int to, uint64_t number) {
  MailboxPair& mailboxes = pairs_[to].mailboxes;
  mailboxes.acknowledge(number, group().isGone(to));
  if (mailboxes.owes()) owes_ = true;
}

}  // namespace mooncake
