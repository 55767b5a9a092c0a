#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>

#include "base/result.h"
#include "collectives/mailbox.h"
#include "engine/window.h"

namespace mooncake {

// The two mailboxes between this rank and another one: puts our messages and acknowledgements into
// the peer's, and reads the peer's out of ours. Waits for nothing. What was put over a connection is
// kept until the peer has taken it, and putAgain() puts it again over a new one.
//
// `isGone` in a call: the current group goes on without the peer, so nothing is put there any more.
//
// The caller serializes the calls (PointToPoint's lock), and keeps the window.
class MailboxPair {
 public:
  MailboxPair(const Window& window, int peer) : window_(window), peer_(peer) {}

  // Load and store reach the peer's mailbox, so no broken connection can lose what is put there.
  bool isMapped() const { return window_.peerPtr(peer_) != nullptr; }

  // Number of messages put for the peer, and whether there is a cell for one more.
  uint64_t sent() const { return sent_; }
  bool hasRoom() const;
  // Begins the next message, and returns the cell to fill. `scratch`: a cell that mapped peers may
  // share. Then put() puts it.
  MailboxCell& next(MailboxCell& scratch);
  Status put(const MailboxCell& cell);

  // Number of messages taken from the peer. Returns the cell of the next one, or null: none has come.
  // The peer may still change the cell, so each field is read once.
  uint64_t taken() const { return taken_; }
  const MailboxCell* arrived() const;
  // Counts the message of arrived() as taken.
  void take() { ++taken_; }
  // Tells the peer how many cells are free again, if they are half a mailbox at least.
  void giveBackCells();

  // Acknowledges that the peer's large message with this number was fetched.
  void acknowledge(uint64_t number, bool isGone);
  // Acknowledgements that the peer has not read yet, oldest first.
  const std::deque<uint64_t>& unread() const { return acks_; }
  // Whether the peer has no room for an acknowledgement that is due. putAcks() tries it again.
  bool owes() const { return acksPut_ != acksRead_ + acks_.size(); }
  void putAcks(bool isGone);
  void dropAcks();
  // Calls `take` with each number that the peer has acknowledged since the last call.
  void takeAcks(const std::function<void(uint64_t number)>& take);

  // The peer has left the group, and its memory may be gone: nothing is put there any more.
  void leave() { hasLeft_ = true; }
  // Puts all that the peer may lack, after a connection was made again. Only for a peer that is not
  // mapped.
  void putAgain(bool isGone);

 private:
  const Mailbox& ours() const;
  size_t there(size_t offset) const;
  Status place(size_t offset, std::span<const std::byte> data, size_t stampOffset, uint64_t stamp);
  Status placeCell(uint64_t number, const MailboxCell& cell);
  void tellTaken();
  void tellAcksTaken();

  const Window& window_;
  const int peer_;
  bool hasLeft_ = false;
  uint64_t sent_ = 0;
  uint64_t taken_ = 0;
  uint64_t credited_ = 0;  // value of `taken_` that the peer was last told
  // The last cells for a peer that is not mapped, by number % kMailboxCells.
  std::unique_ptr<MailboxCell[]> kept_;
  std::deque<uint64_t> acks_;  // see unread()
  uint64_t acksRead_ = 0;      // number of the last acknowledgement that the peer has read
  uint64_t acksPut_ = 0;       // number of the last one that was put
  uint64_t acksTaken_ = 0;     // number of the peer's acknowledgements that were read here
  uint64_t acksCredited_ = 0;  // value of `acksTaken_` that the peer was last told
};

}  // namespace mooncake
