#pragma once

#include <atomic>
#include <deque>
#include <list>
#include <memory>
#include <span>
#include <vector>

#include "base/deadline.h"
#include "base/result.h"
#include "collectives/group.h"
#include "collectives/mailbox.h"
#include "collectives/turn.h"

namespace mooncake {

// One send or receive. Made by PointToPoint; finished() once it has ended, then `status` says how.
class Message {
 public:
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  const Status& status() const { return status_; }  // once finished
  int peer() const { return peer_; }  // of a receive from any source: who sent, once finished
  Deadline deadline() const { return deadline_; }

 private:
  friend class PointToPoint;
  Message(bool isSend, int peer, uint32_t tag, std::span<std::byte> data, Deadline deadline)
      : isSend_(isSend), peer_(peer), tag_(tag), data_(data), deadline_(deadline) {}

  int firstSource() const { return peer_ < 0 ? 0 : peer_; }
  int lastSource(int size) const { return peer_ < 0 ? size - 1 : peer_; }

  const bool isSend_;
  int peer_;  // -1: any source
  const uint32_t tag_;
  const std::span<std::byte> data_;
  const Deadline deadline_;
  MemoryRegion region_;    // large send: what the receiver fetches
  uint64_t number_ = 0;    // send: 0 while it waits for a free cell
  uint32_t ack_ = kNoAck;  // send: the word that the receiver stamps; receive: where to stamp
  RemoteRegion source_;    // large receive: where the message lies
  std::unique_ptr<Completion> fetch_;  // large receive, under way
  uint64_t renewals_ = 0;              // of the connection, when the fetch began
  Status status_;
  std::atomic<bool> finished_{false};
};

// Sends and receives of a group: matched by source and tag, in order between a pair of ranks and a
// tag, beside the collectives. Any thread may call; whoever waits drives the progress of all.
//
// A connection that is made again loses nothing: what has been put into a mailbox over it is kept
// until the peer has taken it, and put again; stamps only grow, so nothing is received twice. A
// fetch that broke is begun again.
class PointToPoint {
 public:
  static constexpr int kAnySource = -1;

  explicit PointToPoint(Group& group);
  ~PointToPoint();

  // Neither waits. The data belongs to the message until it is finished.
  std::shared_ptr<Message> send(std::span<const std::byte> data, int to, uint32_t tag,
                                Deadline deadline);
  std::shared_ptr<Message> receive(std::span<std::byte> data, int from, uint32_t tag,
                                   Deadline deadline);

  // Until the message is finished or the deadline has passed; false: it is not finished.
  bool wait(const Message& message, Deadline deadline);
  // Moves on whatever can move. True when nothing is under way any more.
  bool progress();
  // How many threads are in wait().
  int drivers() const { return drivers_.load(std::memory_order_relaxed); }
  // Ends everything that is under way, and whatever is posted later, with this error.
  void abort(Error why);

 private:
  // A message that came before its receive.
  struct Early {
    uint64_t number;
    uint32_t tag;
    uint32_t ack;
    uint64_t bytes;
    RemoteRegion region;
    std::vector<std::byte> payload;
  };
  struct Pair {
    uint64_t sent = 0;       // messages put into the peer's mailbox
    uint64_t taken = 0;      // messages taken out of ours
    uint64_t credited = 0;   // of `taken`, told to the peer
    bool isGone = false;     // the peer, as this round began
    bool wanted = false;     // a receive waits for a message of this rank
    bool sendsHeld = false;  // a send to this rank waits for a free cell, so do the later ones
    size_t earlyBytes = 0;
    std::list<Early> early;
    bool ackBusy[kMailboxAcks] = {};
    // Of a peer that is reached by messages: its last cells, as we put them, by number % kCells;
    // the last number that we have acknowledged with each word; how often it was connected anew.
    std::unique_ptr<MailboxCell[]> kept;
    uint64_t acked[kMailboxAcks] = {};
    uint64_t renewals = 0;
  };

  std::shared_ptr<Message> post(std::shared_ptr<Message> message);
  bool drive(const Message& message, Deadline deadline);
  bool progressLocked();
  bool advanceSend(Message& message);
  bool advanceReceive(Message& message);
  bool takeEarly(Message& message, const Early& early);
  bool fetch(Message& message);
  void onRenewed(int rank);
  MailboxCell& outgoing(int to, uint64_t number);
  Status placeCell(int to, uint64_t number, const MailboxCell& cell);
  void takeIn(int from);
  void acknowledge(int to, uint32_t ack, uint64_t number);
  void giveBackCells(int from, uint64_t atLeast = kMailboxCells / 2);
  void endLate(Message& message);
  void end(Message& message, Status status);
  const Mailbox& mailboxOf(int from) const;
  Status place(int to, size_t offset, std::span<const std::byte> data, size_t stampOffset,
               uint64_t stamp);

  Group& group_;
  std::atomic<int> drivers_{0};
  Turn turn_;  // guards everything below
  std::vector<Pair> pairs_;
  std::list<std::shared_ptr<Message>> active_;  // in the order of the calls
  Status aborted_;
  std::unique_ptr<MailboxCell> outgoing_;  // being filled, for a peer that is reached by memory
};

}  // namespace mooncake
