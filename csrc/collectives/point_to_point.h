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
#include "collectives/mailbox_pair.h"
#include "collectives/one_sided.h"
#include "collectives/progress_lock.h"
#include "engine/memory/gate.h"
#include "group/group.h"

namespace mooncake {

// The device that owns the data of a message, if one does. Only for data of more than a cell. Of a
// send, `offer` tells peers how to map it.
struct MessageDevice {
  MemoryOwner owner;
  ExportedMemory offer;
};

// One send, receive, put, signal or wait for a signal, made by PointToPoint. When finished() is
// true, status() says how it ended.
class Message {
 public:
  // The call that made the message. kAwaitApplied waits until a number of puts and signals of a
  // rank have been applied.
  enum class Kind { kSend, kReceive, kPut, kSignal, kAwaitSignal, kAwaitApplied };

  Kind kind() const { return kind_; }
  const char* operation() const;  // "send", "put", ...
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  const Status& status() const { return status_; }  // once finished
  int peer() const { return peer_; }  // receive from any source: the sender, once finished
  Deadline deadline() const { return deadline_; }
  // True if a finished send, put or signal is at the other side, or can be fetched by it.
  bool wasSent() const { return number_ != 0; }

 private:
  friend class PointToPoint;
  Message(Kind kind, int peer, uint32_t tag, std::span<std::byte> data, Deadline deadline,
          uint64_t offset, std::shared_ptr<const void> owner, MessageDevice device)
      : kind_(kind),
        peer_(peer),
        tag_(tag),
        offset_(offset),
        data_(data),
        deadline_(deadline),
        owner_(std::move(owner)),
        device_(std::move(device)) {}

  bool isSent() const {
    return kind_ == Kind::kSend || kind_ == Kind::kPut || kind_ == Kind::kSignal;
  }

  std::string whatIsMissing() const;  // at the deadline

  int firstSource() const { return peer_ < 0 ? 0 : peer_; }
  int lastSource(int size) const { return peer_ < 0 ? size - 1 : peer_; }

  const Kind kind_;
  int peer_;                         // -1: any source
  const uint32_t tag_;               // one-sided: the window's number at its owner
  const uint64_t offset_;            // put: offset in the window; kAwaitApplied: the number
  const std::span<std::byte> data_;  // not touched once finished
  const Deadline deadline_;
  std::shared_ptr<const void> owner_;  // keeps `data_`; released when the message ends
  const MessageDevice device_;
  MemoryRegion region_;  // large send or put: region for the receiver to fetch
  uint64_t number_ = 0;  // send: 0 while it waits for a cell; large receive: the sender's number
  bool isAcknowledged_ = false;        // large send: the receiver has fetched it
  RemoteRegion source_;                // large receive: region of the message
  std::unique_ptr<Completion> fetch_;  // large receive: the fetch in flight
  std::function<Result<bool>()>
      hasData_;                 // send: see PointToPoint::HasData; null: the data is there
  uint64_t reconnections_ = 0;  // Pair::reconnections when the fetch began
  std::function<void()> onDone_;
  Status status_;
  std::atomic<bool> finished_{false};
};

// Point-to-point messages of a group, beside its collectives. Sends and receives match by source
// and tag, in order for each pair of ranks and tag. Any thread may call; each thread that waits
// drives the progress of all messages. Puts and signals are messages for which no receive waits:
// see OneSided.
//
// A reconnect loses no message. A message that was put into a mailbox over a connection is kept
// until the peer has taken it, and is put again. Stamps only grow, so no message is received twice.
// A fetch that broke starts again.
class PointToPoint {
 public:
  static constexpr int kAnySource = -1;

  explicit PointToPoint(Group& group);
  ~PointToPoint();

  // Called when a message has ended well, by the thread that found it, with our lock held: it must
  // not call this object. Null: no call.
  using OnDone = std::function<void()>;

  // Keeps the data of a message alive. The message releases it when it ends, on any thread and with
  // our lock held: its destructor must neither wait nor call this object. Null: the caller keeps
  // the data.
  using Owner = std::shared_ptr<const void>;

  // Returns whether the data of a send is there. Until then the send waits, and so do later ones to
  // the same rank with the same tag. An error ends the message. Called by each look at the message,
  // with our lock held: it must neither wait nor call this object. Null: the data is there.
  using HasData = std::function<Result<bool>()>;

  // Neither send() nor receive() waits. The data belongs to the message until it is finished.
  std::shared_ptr<Message> send(std::span<const std::byte> data, int to, uint32_t tag,
                                Deadline deadline, OnDone onDone = nullptr, Owner owner = nullptr,
                                HasData hasData = nullptr, MessageDevice device = {});
  std::shared_ptr<Message> receive(std::span<std::byte> data, int from, uint32_t tag,
                                   Deadline deadline, OnDone onDone = nullptr,
                                   Owner owner = nullptr, MessageDevice device = {});

  // Opens a window of this rank: memory into which the other ranks put until it is closed. Some
  // thread must drive the progress meanwhile. A rank that learns the number may use it at once.
  Result<uint32_t> openWindow(std::span<std::byte> memory);
  void closeWindow(uint32_t window);
  // Puts into the window that has this number at rank `to`, which may be this rank. The range must
  // lie within the window. Once the message is finished, the data may be changed. It is applied
  // before any later signal of this rank.
  std::shared_ptr<Message> put(std::span<const std::byte> data, int to, uint32_t window,
                               uint64_t offset, Deadline deadline, OnDone onDone = nullptr,
                               Owner owner = nullptr);
  std::shared_ptr<Message> signal(int to, uint32_t window, Deadline deadline,
                                  OnDone onDone = nullptr);
  // Waits for a signal to our own window. Each signal ends one wait.
  std::shared_ptr<Message> awaitSignal(int from, uint32_t window, Deadline deadline,
                                       OnDone onDone = nullptr);
  std::shared_ptr<Message> awaitApplied(int from, uint32_t window, uint64_t count,
                                        Deadline deadline);

  // Returns when the message is finished (true), or the deadline has passed before (false).
  bool wait(const Message& message, Deadline deadline);
  // Ends the message with this error, unless it is finished.
  void cancel(const Message& message, Error why);
  // Moves on every message that can move. True: no message is under way, no window is open, and no
  // acknowledgement is owed.
  bool progress();
  // True while acknowledgements wait for peers to read earlier ones. Some thread must drive the
  // progress meanwhile, even if every message has ended.
  bool owes() const { return owes_.load(std::memory_order_acquire); }
  // True if the last look has found a send whose data is not there yet. No bell rings when it comes:
  // some thread must look again and again.
  bool awaitsData() const { return awaitsData_.load(std::memory_order_acquire); }
  // Number of ranks of the group. Not checked: it never changes.
  int ranks() const NOT_CHECKED { return int(pairs_.size()); }
  // Number of threads in wait() or progress().
  uint32_t drivers() const { return drivers_.inside(); }
  // Ends all messages, and all that are posted later, with this error. The other ranks learn that
  // no message comes from this rank any more.
  void abort(Error why);
  // Called after abort(), when no thread posts any more. Waits until all threads have left wait()
  // and progress(), which they do at their next look, and lets no thread in afterwards. True: the
  // group may be destroyed. False: some thread is late.
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
  struct Pair {
    Pair(Group& group, int peer) : mailboxes(group, peer) {}

    MailboxPair mailboxes;
    bool isGone = false;           // the peer was gone when this round began
    std::optional<uint64_t> left;  // the peer has left the group: number of its messages to us
    bool wanted = false;           // a receive waits for a message of this rank
    bool sendsHeld = false;  // a send to this rank waits for a free cell, and so do the later ones
    std::vector<uint32_t> tagsHeld;  // tags of sends to this rank that wait for their data
    size_t earlyBytes = 0;
    std::list<Early> early;  // by number
    // Large messages to the peer that are under way, by number. One that was given up is not here.
    std::map<uint64_t, Message*> announced;
    uint64_t reconnections = 0;  // number of times that its connection was made again
  };

  using Kind = Message::Kind;

  std::shared_ptr<Message> post(Kind kind, int peer, uint32_t tag, std::span<std::byte> data,
                                Deadline deadline, OnDone onDone, uint64_t offset = 0,
                                Owner owner = nullptr, HasData hasData = nullptr,
                                MessageDevice device = {}) EXCLUDES(progressLock_);
  bool progressLocked() REQUIRES(progressLock_);
  bool advance(Message& message) REQUIRES(progressLock_);
  bool advanceSend(Message& message) REQUIRES(progressLock_);
  bool findData(Message& message) REQUIRES(progressLock_);
  bool announce(Message& message) REQUIRES(progressLock_);
  bool applyHere(Message& message) REQUIRES(progressLock_);
  bool advanceAwait(Message& message) REQUIRES(progressLock_);
  bool isOpen(Message& message) REQUIRES(progressLock_);
  bool advanceReceive(Message& message) REQUIRES(progressLock_);
  bool takeEarly(Message& message, const Early& early) REQUIRES(progressLock_);
  bool fetch(Message& message) REQUIRES(progressLock_);
  void giveUp(Message& message, Status status) REQUIRES(progressLock_);
  void onReconnected(int rank) EXCLUDES(progressLock_);
  void takeIn(int from) REQUIRES(progressLock_);
  bool takeOne(int from, const MailboxCell& cell) REQUIRES(progressLock_);
  void acknowledge(int to, uint64_t number) REQUIRES(progressLock_);
  void payAcks() REQUIRES(progressLock_);
  void noteAcknowledged(Pair& pair, uint64_t number) REQUIRES(progressLock_);
  void stopListening();
  void sayThatWeLeft() REQUIRES(progressLock_);
  void onLeft(const EngineId& from, ByteView message) EXCLUDES(progressLock_);
  bool hasSentAll(int rank) const REQUIRES(progressLock_);
  void endLate(Message& message) REQUIRES(progressLock_);
  Status lost(const Message& message) const REQUIRES(progressLock_);
  std::string titleOf(const Message& message) const;
  void end(Message& message, Status status) REQUIRES(progressLock_);

  Group& group_;
  Gate drivers_;
  ProgressLock progressLock_;
  std::vector<Pair> pairs_ GUARDED_BY(progressLock_);
  OneSided oneSided_ GUARDED_BY(progressLock_);
  // In the order of the calls.
  std::list<std::shared_ptr<Message>> active_ GUARDED_BY(progressLock_);
  std::atomic<bool> owes_{false};        // written with the lock
  std::atomic<bool> awaitsData_{false};  // written with the lock
  Status aborted_ GUARDED_BY(progressLock_);
  // The cell being filled, for a mapped peer.
  std::unique_ptr<MailboxCell> scratch_ GUARDED_BY(progressLock_);
};

}  // namespace mooncake
