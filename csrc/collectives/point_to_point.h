#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/deadline.h"
#include "base/result.h"
#include "collectives/mailbox.h"
#include "collectives/one_sided.h"
#include "collectives/progress_lock.h"
#include "engine/memory/gate.h"
#include "group/group.h"

namespace mooncake {

// One send or receive, put, signal or wait for a signal. Made by PointToPoint; finished() once it
// has ended, then `status` says how.
class Message {
 public:
  // What PointToPoint is asked for. kAwaitApplied: until so many puts and signals of a rank have
  // been applied.
  enum class Kind { kSend, kReceive, kPut, kSignal, kAwaitSignal, kAwaitApplied };

  Kind kind() const { return kind_; }
  const char* operation() const;  // "send", "put", ...
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  const Status& status() const { return status_; }  // once finished
  int peer() const { return peer_; }  // of a receive from any source: who sent, once finished
  Deadline deadline() const { return deadline_; }
  // Of what is sent, once finished: the other side has it, or can fetch it.
  bool wasSent() const { return number_ != 0; }

 private:
  friend class PointToPoint;
  Message(Kind kind, int peer, uint32_t tag, std::span<std::byte> data, Deadline deadline,
          uint64_t offset)
      : kind_(kind), peer_(peer), tag_(tag), offset_(offset), data_(data), deadline_(deadline) {}

  bool isSent() const {
    return kind_ == Kind::kSend || kind_ == Kind::kPut || kind_ == Kind::kSignal;
  }

  int firstSource() const { return peer_ < 0 ? 0 : peer_; }
  int lastSource(int size) const { return peer_ < 0 ? size - 1 : peer_; }

  const Kind kind_;
  int peer_;               // -1: any source
  const uint32_t tag_;     // one-sided: the window, as whoever has it numbers it
  const uint64_t offset_;  // put: in the window; kAwaitApplied: how many
  const std::span<std::byte> data_;
  const Deadline deadline_;
  MemoryRegion region_;    // large send or put: what the receiver fetches
  uint64_t number_ = 0;    // send: 0 while it waits for a free cell
  uint32_t ack_ = kNoAck;  // send: the word that the receiver stamps; receive: where to stamp
  RemoteRegion source_;    // large receive: where the message lies
  std::unique_ptr<Completion> fetch_;  // large receive, under way
  uint64_t reconnections_ = 0;         // of the connection, when the fetch began
  std::function<void()> onDone_;
  Status status_;
  std::atomic<bool> finished_{false};
};

// Sends and receives of a group: matched by source and tag, in order between a pair of ranks and a
// tag, beside the collectives. Any thread may call; whoever waits drives the progress of all. Puts
// and signals are messages that no receive waits for: see OneSided.
//
// A connection that is made again loses nothing: what has been put into a mailbox over it is kept
// until the peer has taken it, and put again; stamps only grow, so nothing is received twice. A
// fetch that broke is begun again.
class PointToPoint {
 public:
  static constexpr int kAnySource = -1;

  explicit PointToPoint(Group& group);
  ~PointToPoint();

  // What is called when a message has ended well, by the thread that found it, in its turn: it must
  // not call us. None: nothing.
  using OnDone = std::function<void()>;

  // Neither waits. The data belongs to the message until it is finished.
  std::shared_ptr<Message> send(std::span<const std::byte> data, int to, uint32_t tag,
                                Deadline deadline, OnDone onDone = nullptr);
  std::shared_ptr<Message> receive(std::span<std::byte> data, int from, uint32_t tag,
                                   Deadline deadline, OnDone onDone = nullptr);

  // Opens a window of this rank: memory that the others put into, until it is closed. Somebody has
  // to drive the progress meanwhile. Whom we tell the number may use it at once.
  Result<uint32_t> openWindow(std::span<std::byte> memory);
  void closeWindow(uint32_t window);
  // Into the window of a rank, which has this number there; also our own. The range lies within it.
  // Finished when the data may be changed: it is applied before any later signal of ours.
  std::shared_ptr<Message> put(std::span<const std::byte> data, int to, uint32_t window,
                               uint64_t offset, Deadline deadline, OnDone onDone = nullptr);
  std::shared_ptr<Message> signal(int to, uint32_t window, Deadline deadline,
                                  OnDone onDone = nullptr);
  // Of our own window. Each signal ends one wait.
  std::shared_ptr<Message> awaitSignal(int from, uint32_t window, Deadline deadline,
                                       OnDone onDone = nullptr);
  std::shared_ptr<Message> awaitApplied(int from, uint32_t window, uint64_t count,
                                        Deadline deadline);

  // Until the message is finished or the deadline has passed; false: it is not finished.
  bool wait(const Message& message, Deadline deadline);
  // Ends the message with this error, unless it is finished.
  void cancel(const Message& message, Error why);
  // Moves on whatever can move. True when nothing is under way any more, and no window is open.
  bool progress();
  // How many threads are in wait() or progress().
  uint32_t drivers() const { return drivers_.inside(); }
  // Ends everything that is under way, and whatever is posted later, with this error. The others
  // learn that nothing comes from us any more.
  void abort(Error why);
  // After abort(), when nobody posts any more: waits for those who are in wait() or progress(),
  // which they leave at their next look, and lets nobody in afterwards. The group may go then; not
  // if false: somebody is late.
  bool close(Deadline deadline) { return drivers_.close(deadline); }

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
  // What a rank says when it leaves the group. Wire form: u64 sent, u64 acked[kMailboxAcks].
  struct Left {
    uint64_t sent = 0;  // messages, into our mailbox
    uint64_t acked[kMailboxAcks] = {};
  };
  struct Pair {
    uint64_t sent = 0;         // messages put into the peer's mailbox
    uint64_t taken = 0;        // messages taken out of ours
    uint64_t credited = 0;     // of `taken`, told to the peer
    bool isGone = false;       // the peer, as this round began
    std::optional<Left> left;  // the peer has left the group
    bool wanted = false;       // a receive waits for a message of this rank
    bool sendsHeld = false;    // a send to this rank waits for a free cell, so do the later ones
    size_t earlyBytes = 0;
    std::list<Early> early;
    // By ack word: the last message that waits for it. The word is free when it is acknowledged,
    // also of a message that has timed out meanwhile.
    uint64_t awaited[kMailboxAcks] = {};
    // Of a peer that is reached by messages: its last cells, as we put them, by number % kCells;
    // the last number that we have acknowledged with each word; how often it was connected anew.
    std::unique_ptr<MailboxCell[]> kept;
    uint64_t acked[kMailboxAcks] = {};
    uint64_t reconnections = 0;
  };

  using Kind = Message::Kind;

  std::shared_ptr<Message> post(Kind kind, int peer, uint32_t tag, std::span<std::byte> data,
                                Deadline deadline, OnDone onDone, uint64_t offset = 0);
  bool drive(const Message& message, Deadline deadline);
  bool progressLocked();
  bool advance(Message& message);
  bool advanceSend(Message& message);
  bool announce(Message& message);
  bool applyHere(Message& message);
  bool advanceAwait(Message& message);
  bool isOpen(Message& message);
  bool advanceReceive(Message& message);
  bool takeEarly(Message& message, const Early& early);
  bool fetch(Message& message);
  void onReconnected(int rank);
  MailboxCell& outgoing(int to, uint64_t number);
  Status placeCell(int to, uint64_t number, const MailboxCell& cell);
  void takeIn(int from);
  bool takeOne(int from, uint64_t number, const MailboxCell& cell);
  void acknowledge(int to, uint32_t ack, uint64_t number);
  void giveBackCells(int from, uint64_t atLeast = kMailboxCells / 2);
  void stopListening();
  void sayThatWeLeft();
  void onLeft(const EngineId& from, ByteView message);
  bool hasSentAll(int rank) const;
  bool isAcknowledged(const Message& message) const;
  void endLate(Message& message);
  Status lost(const Message& message) const;
  std::string titleOf(const Message& message) const;
  static std::string whatIsMissing(const Message& message);
  void end(Message& message, Status status);
  const Mailbox& mailboxOf(int from) const;
  Status place(int to, size_t offset, std::span<const std::byte> data, size_t stampOffset,
               uint64_t stamp);

  Group& group_;
  Gate drivers_;
  ProgressLock progressLock_;  // guards everything below
  std::vector<Pair> pairs_;
  OneSided oneSided_;
  std::list<std::shared_ptr<Message>> active_;  // in the order of the calls
  Status aborted_;
  std::unique_ptr<MailboxCell> outgoing_;  // being filled, for a peer that is reached by memory
};

}  // namespace mooncake
