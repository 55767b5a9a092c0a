#include "collectives/early_messages.h"

#include <algorithm>
#include <utility>

namespace mooncake {
namespace {

// Bytes per sender that may pile up here: messages for which no receive was called yet, and
// acknowledgements that the sender has not read. Beyond this, messages stay in the mailbox and the
// sender waits.
constexpr size_t kEarlyBudget = 64 << 20;

}  // namespace

Status EarlyMessages::takeIn(int from) {
  MessagePair& pair = pairs_[from];
  const auto held = [&] {
    return pair.earlyBytes + oneSided_.heldBytes(from) +
           pair.mailboxes.unread().size() * sizeof(uint64_t);
  };
  while (held() <= kEarlyBudget) {
    const MailboxCell* const cell = pair.mailboxes.arrived();
    if (!cell) return {};
    if (!takeOne(from, *cell)) {
      return {ErrorCode::kProtocol,
              pairs_.group().nameRank(from) + " sent a message that does not decode"};
    }
    pair.mailboxes.take();
    pair.mailboxes.giveBackCells();
  }
  return {};
}

// Takes one message out of its cell. False: the content of the cell is invalid. Each field is read
// once, into our own memory, because the sender may still change the cell.
bool EarlyMessages::takeOne(int from, const MailboxCell& cell) {
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

bool EarlyMessages::hasSentAll(int rank) const {
  const MessagePair& pair = pairs_[rank];
  return pair.left && pair.mailboxes.taken() >= *pair.left && !oneSided_.holdsBack(rank);
}

const EarlyMessage* EarlyMessages::find(int from, uint32_t tag) const {
  const std::list<EarlyMessage>& early = pairs_[from].early;
  const auto found = std::ranges::find(early, tag, &EarlyMessage::tag);
  return found == early.end() ? nullptr : &*found;
}

EarlyMessage EarlyMessages::take(int from, uint32_t tag) {
  MessagePair& pair = pairs_[from];
  const auto found = std::ranges::find(pair.early, tag, &EarlyMessage::tag);
  EarlyMessage taken = std::move(*found);
  pair.early.erase(found);
  pair.earlyBytes -= taken.heldBytes();
  return taken;
}

void EarlyMessages::putBack(int from, EarlyMessage message) {
  MessagePair& pair = pairs_[from];
  const auto behind =
      std::ranges::upper_bound(pair.early, message.number, {}, &EarlyMessage::number);
  pair.earlyBytes += message.heldBytes();
  pair.early.insert(behind, std::move(message));
}

}  // namespace mooncake
