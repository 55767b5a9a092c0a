#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <list>
#include <map>
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
          uint64_t offset, std::shared_ptr<const void> owner)
      : kind_(kind),
        peer_(peer),
        tag_(tag),
        offset_(offset),
        data_(data),
        deadline_(deadline),
        owner_(std::move(owner)) {}

  bool isSent() const {
    return kind_ == Kind::kSend || kind_ == Kind::kPut || kind_ == Kind::kSignal;
  }

  int firstSource() const { return peer_ < 0 ? 0 : peer_; }
  int lastSource(int size) const { return peer_ < 0 ? size - 1 : peer_; }

  const Kind kind_;
  int peer_;                         // -1: any source
  const uint32_t tag_;               // one-sided: the window, as whoever has it numbers it
  const uint64_t offset_;            // put: in the window; kAwaitApplied: how many
  const std::span<std::byte> data_;  // not touched once finished
  const Deadline deadline_;
  std::shared_ptr<const void> owner_;  // keeps `data_`; released when the message ends
  MemoryRegion region_;                // large send or put: what the receiver fetches
  uint64_t number_ = 0;  // send: 0 while it waits for a free cell; large receive: its sender's
  bool isAcknowledged_ = false;        // large send: the receiver has fetched it
  RemoteRegion source_;                // large receive: where the message lies
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

  // Keeps the data of a message. The message releases it when it ends, on any thread and with our
  // lock held: the destructor must neither wait nor call us. Null: the caller keeps the data.
  using Owner = std::shared_ptr<const void>;

  // Neither waits. The data belongs to the message until it is finished.
  std::shared_ptr<Message> send(std::span<const std::byte> data, int to, uint32_t tag,
                                Deadline deadline, OnDone onDone = nullptr, Owner owner = nullptr);
  std::shared_ptr<Message> receive(std::span<std::byte> data, int from, uint32_t tag,
                                   Deadline deadline, OnDone onDone = nullptr,
                                   Owner owner = nullptr);

  // Opens a window of this rank: memory that the others put into, until it is closed. Somebody has
  // to drive the progress meanwhile. Whom we tell the number may use it at once.
  Result<uint32_t> openWindow(std::span<std::byte> memory);
  void closeWindow(uint32_t window);
  // Into the window of a rank, which has this number there; also our own. The range lies within it.
  // Finished when the data may be changed: it is applied before any later signal of ours.
  std::shared_ptr<Message> put(std::span<const std::byte> data, int to, uint32_t window,
                               uint64_t offset, Deadline deadline, OnDone onDone = nullptr,
                               Owner owner = nullptr);
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
  // Acknowledgements wait until their peers have read earlier ones: somebody has to drive the
  // progress meanwhile, though every message has ended.
  bool owes() const { return owes_.load(std::memory_order_acquire); }
  int ranks() const { return int(pairs_.size()); }  // of the group
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
    uint64_t bytes;
    RemoteRegion region;
    std::vector<std::byte> payload;

    size_t heldBytes() const { return sizeof(Early) + payload.size(); }
  };
  // The acknowledgements that the peer has not read yet, oldest first; so they are there to be put
  // again over a new connection.
  struct Acks {
    std::deque<uint64_t> waiting;  // numbers of the peer's messages
    uint64_t read = 0;             // by the peer: the number of the one before waiting.front()
    uint64_t put = 0;              // number of the last one that was put

    bool allPut() const { return put == read + waiting.size(); }
  };
  struct Pair {
    uint64_t sent = 0;             // messages put into the peer's mailbox
    uint64_t taken = 0;            // messages taken out of ours
    uint64_t credited = 0;         // of `taken`, told to the peer
    bool isGone = false;           // the peer, as this round began
    std::optional<uint64_t> left;  // the peer has left the group, after so many messages to us
    bool wanted = false;           // a receive waits for a message of this rank
    bool sendsHeld = false;  // a send to this rank waits for a free cell, so do the later ones
    size_t earlyBytes = 0;
    std::list<Early> early;  // by number
    // Large messages to the peer that are under way, by number. One that was given up is not here.
    std::map<uint64_t, Message*> announced;
    uint64_t acksTaken = 0;     // acknowledgements of the peer's that were read here
    uint64_t acksCredited = 0;  // of `acksTaken`, told to the peer
    Acks acks;                  // for the peer
    // Of a peer that is reached by messages: its last cells, as we put them, by number % kCells;
    // how often it was connected anew.
    std::unique_ptr<MailboxCell[]> kept;
    uint64_t reconnections = 0;
  };

  using Kind = Message::Kind;

  std::shared_ptr<Message> post(Kind kind, int peer, uint32_t tag, std::span<std::byte> data,
                                Deadline deadline, OnDone onDone, uint64_t offset = 0,
                                Owner owner = nullptr);
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
  void giveUp(Message& message, Status status);
  void onReconnected(int rank);
  MailboxCell& outgoing(int to, uint64_t number);
  Status placeCell(int to, uint64_t number, const MailboxCell& cell);
  void takeIn(int from);
  bool takeOne(int from, uint64_t number, const MailboxCell& cell);
  void acknowledge(int to, uint64_t number);
  void putAcks(int to);
  void payAcks();
  void takeAcks(int from);
  void noteAcknowledged(Pair& pair, uint64_t number);
  void giveBackAcks(int from, uint64_t atLeast = kMailboxAcks / 2);
  void giveBackCells(int from, uint64_t atLeast = kMailboxCells / 2);
  void stopListening();
  void sayThatWeLeft();
  void onLeft(const EngineId& from, ByteView message);
  bool hasSentAll(int rank) const;
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
  std::atomic<bool> owes_{false};               // written with the lock
  Status aborted_;
  std::unique_ptr<MailboxCell> outgoing_;  // being filled, for a peer that is reached by memory
};

}  // namespace mooncake
