#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "engine/transfer.h"

// Point-to-point messages between a pair of ranks. A's part of the window holds the mailbox of the
// messages that B sends to A, and what B has to say about the messages that A sends to B:
//
//   0    taken      stamp: how many of A's messages B has taken out of its mailbox (A may be kCells
//                   ahead)
//   64   acks[8]    stamps: B has fetched A's large message with this number
//   128  cells[8]   message number m lies in cell m % 8:
//                   arrived, tag, ack, bytes, region, offset, kind | payload
//
// A message that fits a cell is complete when it is in the cell. A larger one announces where it
// can be fetched, and is complete for its sender when the receiver has acknowledged it.
//
// A put and a signal are messages, too, that no receive waits for: `tag` is the receiver's number
// of the window (one_sided.h) that they are for, `offset` where in it a put goes.
namespace mooncake {

constexpr size_t kMailboxCells = 8;
constexpr size_t kMailboxAcks = 8;
constexpr size_t kCellPayload = 8 << 10;
constexpr uint32_t kNoAck = ~uint32_t(0);

// Wire format: append only.
enum class CellKind : uint32_t { kMessage = 0, kPut = 1, kSignal = 2 };

struct alignas(64) MailboxCell {
  std::atomic<uint64_t> arrived;  // stamp: number of the message
  uint32_t tag;
  uint32_t ack;  // which of the sender's ack words waits for this message; kNoAck: none
  uint64_t bytes;
  RemoteRegion region;
  uint64_t offset;
  CellKind kind;
  alignas(64) std::byte payload[kCellPayload];
};
constexpr size_t kCellHeaderBytes = 64;
static_assert(offsetof(MailboxCell, payload) == kCellHeaderBytes);

struct alignas(64) Mailbox {
  std::atomic<uint64_t> taken;
  alignas(64) std::atomic<uint64_t> acks[kMailboxAcks];
  MailboxCell cells[kMailboxCells];
};
constexpr size_t kMailboxBytes = sizeof(Mailbox);

}  // namespace mooncake
