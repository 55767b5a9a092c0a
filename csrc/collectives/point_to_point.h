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
#include "collectives/early_messages.h"
#include "collectives/message.h"
#include "collectives/message_pairs.h"
#include "collectives/one_sided.h"
#include "collectives/progress_lock.h"
#include "engine/memory/gate.h"
#include "group/group.h"

namespace mooncake {

// Point-to-point messages of a group, beside its collectives, and of the groups that follow it in its
// line: see move(). Sends and receives match by source
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

  // `untilReceived`: every send ends when a receive has taken its message, as long ones do anyway. Else
  // a short one ends once it is in the receiver's mailbox, which may die with it.
  explicit PointToPoint(Group& group, bool untilReceived = false);
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
  // Numbers of a window at the target, and of our window that was opened with it; 0: none was. If
  // another process has taken the target's rank since then, the message ends with kInvalidArgument.
  struct WindowAt {
    uint32_t number = 0;
    uint32_t ours = 0;
  };
  // Puts into a window of rank `to`, which may be this rank. The range must lie within the window.
  // Once the message is finished, the data may be changed. It is applied before any later signal of
  // this rank.
  std::shared_ptr<Message> put(std::span<const std::byte> data, int to, WindowAt window,
                               uint64_t offset, Deadline deadline, OnDone onDone = nullptr,
                               Owner owner = nullptr);
  std::shared_ptr<Message> signal(int to, WindowAt window, Deadline deadline,
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
  // Goes on with the successor of the group: it has the same ranks, shares the line's bell
  // (GroupOptions::bell), and has mailboxes. `stays[r]`: rank r is the same process in both groups.
  // The answer must be the same at both ends of a pair.
  //
  // Messages with the ranks that stay cross over, whatever their state: they keep the mailboxes of
  // the group in which the two ranks met. So the ends of a pair need not move at the same time.
  // Messages with the other ranks begin anew. A message to a process that is not in the successor
  // ends with kPeerLost here, unless it has ended before.
  //
  // Any thread, also while other threads wait in this object, but one call at a time, and none
  // beside abort(). When it returns, this object does not use the old group any more.
  void move(Group& successor, const std::vector<bool>& stays) EXCLUDES(progressLock_);
  // Parameters of a wait that ends when messages may have moved: the line's bell rings then.
  Waiter waiter(Deadline deadline) const;
  // Wakes the threads that wait so.
  void ring() const { line_->doorbell().ring(); }
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
  int ranks() const NOT_CHECKED { return pairs_.size(); }
  // Number of threads in wait() or progress().
  uint32_t drivers() const { return drivers_.inside(); }
  // Ends all messages, and all that are posted later, with this error. The other ranks learn that
  // no message comes from this rank any more.
  void abort(Error why);
  // Called after abort(), when no thread posts any more. Waits until all threads have left wait()
  // and progress(), which they do at their next look, and lets no thread in afterwards. True: the
  // group may be destroyed. False: some thread is late.
  bool close(Deadline deadline) EXCLUDES(progressLock_);

 private:
  using Kind = Message::Kind;

  std::shared_ptr<Message> post(Kind kind, int peer, uint32_t tag, std::span<std::byte> data,
                                Deadline deadline, OnDone onDone, uint64_t offset = 0,
                                Owner owner = nullptr, HasData hasData = nullptr,
                                MessageDevice device = {}, uint32_t ours = 0)
      EXCLUDES(progressLock_);
  bool progressLocked() REQUIRES(progressLock_);
  bool advance(Message& message) REQUIRES(progressLock_);
  bool advanceSend(Message& message) REQUIRES(progressLock_);
  bool findData(Message& message) REQUIRES(progressLock_);
  bool announce(Message& message) REQUIRES(progressLock_);
  bool applyHere(Message& message) REQUIRES(progressLock_);
  bool advanceAwait(Message& message) REQUIRES(progressLock_);
  bool isOpen(Message& message) REQUIRES(progressLock_);
  bool advanceReceive(Message& message) REQUIRES(progressLock_);
  bool takeEarly(Message& message, const EarlyMessage& early) REQUIRES(progressLock_);
  bool fetch(Message& message) REQUIRES(progressLock_);
  void giveUp(Message& message, Status status) REQUIRES(progressLock_);
  void listen(const Meeting& place);
  void watchReconnectsOf(Group& group);
  void onReconnected(int rank) EXCLUDES(progressLock_);
  void acknowledge(int to, uint64_t number) REQUIRES(progressLock_);
  void stopListening() EXCLUDES(progressLock_);
  void endLate(Message& message) REQUIRES(progressLock_);
  Status lost(const Message& message) const REQUIRES(progressLock_);
  std::string titleOf(const Message& message) const REQUIRES(progressLock_);
  void end(Message& message, Status status) REQUIRES(progressLock_);

  Group& group() const REQUIRES(progressLock_) { return pairs_.group(); }

  const bool untilReceived_;
  std::shared_ptr<LineBell> line_;
  std::atomic<SpinPolicy> spin_;
  Gate drivers_;
  ProgressLock progressLock_;
  MessagePairs pairs_ GUARDED_BY(progressLock_);
  OneSided oneSided_ GUARDED_BY(progressLock_);
  EarlyMessages early_ GUARDED_BY(progressLock_);
  // In the order of the calls.
  std::list<std::shared_ptr<Message>> active_ GUARDED_BY(progressLock_);
  std::atomic<bool> owes_{false};        // written with the lock
  std::atomic<bool> awaitsData_{false};  // written with the lock
  Status aborted_ GUARDED_BY(progressLock_);
  // The cell being filled, for a mapped peer.
  std::unique_ptr<MailboxCell> scratch_ GUARDED_BY(progressLock_);
};

}  // namespace mooncake
