#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "engine/contract/transfer.h"
#include "engine/window.h"

// Point-to-point messages between a pair of ranks. They use the mailboxes of the group in which the
// two met: Group::mailboxes(), a window with one mailbox for each rank. In A's part, B's mailbox
// holds the messages from B to A, and B's reports about messages from A to B:
//
//   0    taken      stamp: how many of A's messages B has taken out of its mailbox (A may be
//                   kMailboxCells ahead)
//   8    acksTaken  stamp: how many of A's acknowledgements B has read (A may be kMailboxAcks
//                   ahead)
//   64   acks[32]   acknowledgement number n lies in place n % 32:
//                   arrived, number of A's large message that B has fetched
//   576  cells[8]   message number m lies in cell m % 8:
//                   arrived, tag, kind, bytes, region, offset | payload
//
// A message that fits a cell is complete when it is in the cell. A larger one, and one of a sender that
// waits for its receive, announces its region, and is complete for its sender when the receiver has
// acknowledged its number. An announcement
// that was taken occupies no cell. So any number of large messages may be under way, in any order
// of receives, and one that was given up does not hold up the next.
//
// Puts and signals are messages for which no receive waits. Their `tag` is the receiver's number of
// the target window (one_sided.h), and `offset` is the place of a put in that window.
namespace mooncake {

constexpr size_t kMailboxCells = 8;
constexpr size_t kMailboxAcks = 32;
constexpr size_t kCellPayload = 8 << 10;

// Wire format: append only.
enum class CellKind : uint32_t { kMessage = 0, kPut = 1, kSignal = 2 };

struct alignas(64) MailboxCell {
  std::atomic<uint64_t> arrived;  // stamp: number of the message
  uint32_t tag;
  CellKind kind;
  uint64_t bytes;
  RemoteRegion region;  // region to fetch from; empty: the data is in `payload`
  uint64_t offset;
  alignas(64) std::byte payload[kCellPayload];
};
constexpr size_t kCellHeaderBytes = 64;
static_assert(offsetof(MailboxCell, payload) == kCellHeaderBytes);

struct MailboxAck {
  std::atomic<uint64_t> arrived;  // stamp: number of the acknowledgement
  uint64_t message;
};

struct alignas(64) Mailbox {
  std::atomic<uint64_t> taken;
  std::atomic<uint64_t> acksTaken;
  alignas(64) MailboxAck acks[kMailboxAcks];
  MailboxCell cells[kMailboxCells];
};
constexpr size_t kMailboxBytes = sizeof(Mailbox);

// Offset in a part of the mailbox that rank `from` puts into.
constexpr size_t mailboxOf(int from) { return Window::kUserOffset + size_t(from) * kMailboxBytes; }

}  // namespace mooncake
