#include "collectives/point_to_point.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/failpoint.h"
#include "base/mutex.h"
#include "base/rank_list.h"

namespace mooncake {
namespace {

constexpr const char* kJoinedAfter =
    ": another process took this rank after the window was registered. Register a window again, on "
    "all ranks";

// The data of a send. A peer that fetches it only reads through this span.
std::span<std::byte> readOnly(std::span<const std::byte> data) {
  return {const_cast<std::byte*>(data.data()), data.size()};
}

}  // namespace

PointToPoint::PointToPoint(Group& group, bool untilReceived)
    : untilReceived_(untilReceived),
      line_(group.bell()),
      spin_(group.spin()),
      progressLock_(line_->doorbell()),
      pairs_(group),
      oneSided_(group, [this](int to, uint64_t number)
                           REQUIRES(progressLock_) { acknowledge(to, number); }),
      early_(pairs_, oneSided_),
      scratch_(new MailboxCell) {
  watchReconnectsOf(group);
  listen(*pairs_.newest());
}

// After abort() and close() the group may be gone.
PointToPoint::~PointToPoint() {
  if (aborted_.ok()) stopListening();
}

void PointToPoint::watchReconnectsOf(Group& group) {
  group.watchReconnects([this](int rank) { onReconnected(rank); });
}

// The handler runs on the loop's thread, until the topic is closed. It must not own the place, which
// owns the engine.
void PointToPoint::listen(const Meeting& place) {
  place.mailboxes->engine().openTopic(place.topic,
                                      [this, &place](const EngineId& from, ByteView message) {
                                        Guard lock(progressLock_);
                                        pairs_.onLeft(place, from, message);
                                        progressLocked();
                                        line_->doorbell().ring();
                                      });
}

void PointToPoint::move(Group& successor, const std::vector<bool>& stays) {
  // Of both groups meanwhile: to put again twice does no harm, to miss a new connection does.
  watchReconnectsOf(successor);
  std::vector<std::shared_ptr<const Meeting>> unused;
  Group* old = nullptr;
  const Meeting* newest = nullptr;
  {
    Guard lock(progressLock_);
    old = &group();
    for (auto& message : active_) {
      const int peer = message->peer_;
      if (peer == kAnySource) continue;
      // The successor's window cannot cancel a fetch from a rank that is not in it.
      const bool hasFetch = message->fetch_ && !successor.window().peer(peer);
      if (stays[size_t(peer)] && !hasFetch) continue;
      giveUp(*message, {ErrorCode::kPeerLost, titleOf(*message) + ": " + old->whyGone(peer)});
    }
    std::erase_if(active_, [](const auto& message) { return message->finished(); });
    oneSided_.move(successor, stays);
    unused = pairs_.move(successor, stays);
    newest = pairs_.newest().get();
    spin_ = successor.spin();
    progressLocked();
    ring();
  }
  old->watchReconnects(nullptr);
  for (const auto& place : unused) place->mailboxes->engine().closeTopic(place->topic);
  if (newest) listen(*newest);
}

Waiter PointToPoint::waiter(Deadline deadline) const {
  const Interrupt& interrupt = line_->interrupt();
  return {line_->doorbell(), interrupt, interrupt.generation(), deadline, spin_.load()};
}

bool PointToPoint::close(Deadline deadline) {
  if (!drivers_.close(deadline)) return false;
  std::vector<std::shared_ptr<const Meeting>> places;
  {
    Guard lock(progressLock_);
    places = pairs_.leave();
  }
  line_.reset();
  return true;
}

std::shared_ptr<Message> PointToPoint::send(std::span<const std::byte> data, int to, uint32_t tag,
                                            Deadline deadline, OnDone onDone, Owner owner,
                                            HasData hasData, MessageDevice device) {
  return post(Kind::kSend, to, tag, readOnly(data), deadline, std::move(onDone), 0,
              std::move(owner), std::move(hasData), std::move(device));
}

std::shared_ptr<Message> PointToPoint::receive(std::span<std::byte> data, int from, uint32_t tag,
                                               Deadline deadline, OnDone onDone, Owner owner,
                                               MessageDevice device) {
  return post(Kind::kReceive, from, tag, data, deadline, std::move(onDone), 0, std::move(owner),
              nullptr, std::move(device));
}

std::shared_ptr<Message> PointToPoint::put(std::span<const std::byte> data, int to, WindowAt window,
                                           uint64_t offset, Deadline deadline, OnDone onDone,
                                           Owner owner) {
  return post(Kind::kPut, to, window.number, readOnly(data), deadline, std::move(onDone), offset,
              std::move(owner), nullptr, {}, window.ours);
}

std::shared_ptr<Message> PointToPoint::signal(int to, WindowAt window, Deadline deadline,
                                              OnDone onDone) {
  return post(Kind::kSignal, to, window.number, {}, deadline, std::move(onDone), 0, nullptr,
              nullptr, {}, window.ours);
}

std::shared_ptr<Message> PointToPoint::awaitSignal(int from, uint32_t window, Deadline deadline,
                                                   OnDone onDone) {
  return post(Kind::kAwaitSignal, from, window, {}, deadline, std::move(onDone));
}

std::shared_ptr<Message> PointToPoint::awaitApplied(int from, uint32_t window, uint64_t count,
                                                    Deadline deadline) {
  return post(Kind::kAwaitApplied, from, window, {}, deadline, nullptr, count);
}

Result<uint32_t> PointToPoint::openWindow(std::span<std::byte> memory) {
  Guard lock(progressLock_);
  if (!aborted_.ok()) return aborted_.error();
  return oneSided_.open(memory);
}

void PointToPoint::closeWindow(uint32_t window) {
  const Gate::Pass inside(drivers_);
  if (!inside) return;
  Guard lock(progressLock_);
  if (!aborted_.ok()) return;  // abort() has closed it
  oneSided_.close(window);
  progressLocked();  // ends the messages that wait for it
}

std::shared_ptr<Message> PointToPoint::post(Message::Kind kind, int peer, uint32_t tag,
                                            std::span<std::byte> data, Deadline deadline,
                                            OnDone onDone, uint64_t offset, Owner owner,
                                            HasData hasData, MessageDevice device, uint32_t ours) {
  std::shared_ptr<Message> message(
      new Message(kind, peer, tag, data, deadline, offset, std::move(owner), std::move(device)));
  message->onDone_ = std::move(onDone);
  message->hasData_ = std::move(hasData);
  message->ours_ = ours;
  Guard lock(progressLock_);
  if (!aborted_.ok()) {
    end(*message, aborted_);
  } else if (auto usable = group().usable(); !usable.ok()) {
    end(*message, std::move(usable));  // before anything is sent
  } else if (oneSided_.hasJoinedAfter(ours, peer)) {
    end(*message, Error{ErrorCode::kInvalidArgument, titleOf(*message) + kJoinedAfter});
  } else {
    group().engine().markActive();
    active_.push_back(message);
    progressLocked();
  }
  return message;
}

// Called without the lock, because handlers take it.
void PointToPoint::stopListening() {
  Group* current = nullptr;
  std::vector<std::shared_ptr<const Meeting>> places;
  {
    Guard lock(progressLock_);
    current = &group();
    places = pairs_.places();
  }
  current->watchReconnects(nullptr);
  for (const auto& place : places) place->mailboxes->engine().closeTopic(place->topic);
}

void PointToPoint::abort(Error why) {
  stopListening();
  Guard lock(progressLock_);
  aborted_ = std::move(why);
  // Before sends end and their memory is revoked, so that a peer that fetches from it knows why.
  if (!group().membership()->isOver()) pairs_.sayThatWeLeft();
  for (auto& message : active_) {
    if (message->fetch_) group().window().cancel(*message->fetch_);
    end(*message, aborted_);
  }
  active_.clear();
  oneSided_.closeAll();
  for (int r = 0; r < pairs_.size(); ++r) pairs_[r].mailboxes.dropAcks();
  owes_ = false;
  ring();
}

void PointToPoint::cancel(const Message& message, Error why) {
  Guard lock(progressLock_);
  const auto found = std::ranges::find(active_, &message, &std::shared_ptr<Message>::get);
  if (found == active_.end()) return;
  Message& ours = **found;
  why.message = titleOf(ours) + ": " + why.message;
  giveUp(ours, std::move(why));
  active_.erase(found);
  ring();
}

bool PointToPoint::wait(const Message& message, Deadline deadline) {
  if (message.finished()) return true;
  const Gate::Pass inside(drivers_);
  if (!inside) return message.finished();  // finished by abort()
  Waiter waiter = this->waiter(deadline.earlier(message.deadline()));
  const auto look = [&] {
    if (message.finished()) return true;
    // If another thread holds the lock, it rings when a message has ended and when it unlocks.
    if (progressLock_.try_lock()) {
      const Guard lock(progressLock_, std::adopt_lock);
      progressLocked();
    }
    return message.finished();
  };
  for (;;) {
    const auto how = waiter.until(look);
    failpoint("message-looked");
    if (how == WaitResult::kReady) return true;
    if (how == WaitResult::kInterrupted) waiter.generation = waiter.interrupt.generation();
    {
      Guard lock(progressLock_);
      progressLocked();  // ends messages that cannot end well any more
    }
    if (message.finished()) return true;
    if (how == WaitResult::kTimeout && deadline.passed()) return false;
  }
}

bool PointToPoint::progress() {
  const Gate::Pass inside(drivers_);
  if (!inside) return true;
  Guard lock(progressLock_);
  return progressLocked();
}

bool PointToPoint::progressLocked() {
  if (owes()) owes_ = pairs_.payAcks();
  awaitsData_ = false;
  if (active_.empty() && !oneSided_.any()) return !owes();
  // All arrivals are taken in before any message is matched. Then messages are visited in the order
  // of the calls. So an earlier receive takes the earlier message, and a send that cannot move
  // holds back the later ones to the same rank.
  for (const auto& message : active_) {
    // isOut and isGone are read before the mailboxes. A peer's last signals come before its end. So a message
    // that does not move in this round, although its peer had ended before the round, never will.
    const bool isMatched = message->kind_ != Kind::kReceive || message->fetch_;
    for (int r = message->firstSource(); r <= message->lastSource(pairs_.size()); ++r) {
      pairs_[r].isOut = group().isOut(r);
      pairs_[r].isGone = group().isGone(r);
      if (!isMatched) pairs_[r].wanted = true;
    }
  }
  const bool fromAll = oneSided_.any();
  for (int from = 0; from < pairs_.size(); ++from) {
    pairs_[from].sendsHeld = false;
    pairs_[from].tagsHeld.clear();
    const bool wanted = std::exchange(pairs_[from].wanted, false) || fromAll;
    if (!wanted || from == group().rank() || pairs_[from].isClosed) continue;
    if (const Status taken = early_.takeIn(from); !taken.ok()) group().fail(taken.error());
    // A process that was evicted may go on to store messages. A receive that ends now without one must
    // not be followed by one that gets it.
    pairs_[from].isClosed = pairs_[from].isOut;
  }
  oneSided_.progress();

  bool moved = false;
  for (auto it = active_.begin(); it != active_.end();) {
    Message& message = **it;
    if (!advance(message)) endLate(message);
    if (message.finished()) {
      it = active_.erase(it);
      moved = true;
    } else {
      ++it;
    }
  }
  if (moved) ring();
  return active_.empty() && !oneSided_.any() && !owes();
}

// True when the message is finished.
bool PointToPoint::advance(Message& message) {
  switch (message.kind_) {
    case Kind::kReceive:
      return advanceReceive(message);
    case Kind::kAwaitSignal:
    case Kind::kAwaitApplied:
      return advanceAwait(message);
    default:
      return message.peer_ == group().rank() ? applyHere(message) : advanceSend(message);
  }
}

// A put or a signal to ourselves.
bool PointToPoint::applyHere(Message& message) {
  if (!isOpen(message)) return true;
  if (message.kind_ == Kind::kPut) {
    oneSided_.putHere(message.tag_, message.offset_, message.data_);
  } else {
    oneSided_.signalHere(message.tag_);
  }
  end(message, {});
  return true;
}

bool PointToPoint::advanceAwait(Message& message) {
  if (!isOpen(message)) return true;
  const bool isThere = message.kind_ == Kind::kAwaitSignal
                           ? oneSided_.takeSignal(message.tag_, message.peer_)
                           : oneSided_.applied(message.tag_, message.peer_) >= message.offset_;
  if (isThere) end(message, {});
  return isThere;
}

// True if the message's window, one of ours, is open and the peer has a part of it. Otherwise ends the
// message.
bool PointToPoint::isOpen(Message& message) {
  if (oneSided_.hasJoinedAfter(message.tag_, message.peer_)) {
    end(message, Error{ErrorCode::kInvalidArgument, titleOf(message) + kJoinedAfter});
    return false;
  }
  if (oneSided_.isOpen(message.tag_)) return true;
  end(message, Error{ErrorCode::kAborted, titleOf(message) + ": the window was closed meanwhile"});
  return false;
}

// True when the message is finished.
bool PointToPoint::advanceReceive(Message& message) {
  if (message.fetch_) {
    if (!message.fetch_->finished()) return false;
    const ErrorCode code = message.fetch_->error.load(std::memory_order_acquire);
    if (code == ErrorCode::kOk) {
      failpoint("message-fetched");
      acknowledge(message.peer_, message.number_);
      failpoint("message-acknowledged");
      end(message, {});
    } else if ((code == ErrorCode::kPeerLost || code == ErrorCode::kAborted) &&
               !group().isOut(message.peer_)) {
      // The connection broke. It may have been made again since the fetch began. Or the peer has
      // ended, and the view without it is on its way. Or it has fenced us: then the view that
      // excludes us is.
      return pairs_[message.peer_].reconnections != message.reconnections_ && fetch(message);
    } else if (group().isOut(message.peer_) || pairs_[message.peer_].left) {
      end(message,
          Error{ErrorCode::kPeerLost, titleOf(message) + ": " + group().whyGone(message.peer_)});
    } else if (code == ErrorCode::kRefused && group().renewal().mayClose()) {
      // A peer that is taken out of the group gives up its messages when it moves. This rank may move
      // later, and the peer's word that it has left may be on its way.
      return false;
    } else if (code == ErrorCode::kRefused) {
      end(message, Error{code, titleOf(message) + ": it gave up this message of " +
                                   std::to_string(message.data_.size()) + " bytes with tag " +
                                   std::to_string(message.tag_) +
                                   " before it was fetched (its send timed out, or was "
                                   "interrupted). Have it sent again, and receive again"});
    } else {
      giveUp(message, Error{code, titleOf(message) + ": to fetch the message failed (" +
                                      errorCodeName(code) + "). It is kept: receive again"});
    }
    return true;
  }
  for (int from = message.firstSource(); from <= message.lastSource(pairs_.size()); ++from) {
    const EarlyMessage* const early = early_.find(from, message.tag_);
    if (!early) continue;
    if (early->bytes != message.data_.size()) {
      // The message stays: a receive of the right size can still take it.
      end(message, Error{ErrorCode::kInvalidArgument,
                         group().nameRank(from) + " sent a message of " +
                             std::to_string(early->bytes) + " bytes with tag " +
                             std::to_string(message.tag_) + ", but the tensor to receive it has " +
                             std::to_string(message.data_.size()) + " bytes"});
      return true;
    }
    message.peer_ = from;
    return takeEarly(message, early_.take(from, message.tag_));
  }
  return false;
}

bool PointToPoint::takeEarly(Message& message, const EarlyMessage& early) {
  if (early.isWhole()) {
    if (early.bytes) std::memcpy(message.data_.data(), early.payload.data(), early.bytes);
    end(message, {});
    return true;
  }
  message.number_ = early.number;
  message.source_ = early.region;
  return fetch(message);
}

bool PointToPoint::fetch(Message& message) {
  message.reconnections_ = pairs_[message.peer_].reconnections;
  message.fetch_ = std::make_unique<Completion>(&line_->doorbell());
  failpoint("message-fetch");
  auto started = group().window().get(message.peer_, message.source_, 0, message.data_,
                                      *message.fetch_, message.device_.owner);
  // kAborted: we have given up the peer, so its channel is closed, or is about to be.
  if (started.code() == ErrorCode::kPeerLost || started.code() == ErrorCode::kAborted) {
    message.fetch_->error.store(ErrorCode::kPeerLost);
  } else if (!started.ok()) {
    giveUp(message, Error{started.code(), titleOf(message) + ": " + started.error().message});
    return true;
  }
  return advanceReceive(message);  // where memory can be read, the data is here already
}

// "put to rank 3 (global rank 7)"
std::string PointToPoint::titleOf(const Message& message) const {
  return std::string(message.operation()) + (message.isSent() ? " to " : " from ") +
         (message.peer_ == kAnySource ? std::string("any rank") : group().nameRank(message.peer_));
}

// Ends a message that did not move, if it has no chance left. A fetch by a device ends by itself, also
// from a lost rank: the copy from mapped memory may still run. If it were given up here, the next
// receive would take its message.
void PointToPoint::endLate(Message& message) {
  const bool isCopying = message.fetch_ && message.device_.owner;
  Status status;
  if (auto usable = group().usable(); !usable.ok()) {
    status = std::move(usable);
  } else if (Status none = isCopying ? Status() : lost(message); !none.ok()) {
    status = std::move(none);
  } else if (message.deadline_.passed()) {
    status = {ErrorCode::kTimeout, titleOf(message) + " timed out: " + message.whatIsMissing()};
  } else {
    return;
  }
  giveUp(message, std::move(status));
}

// Ends the message with an error. Its memory is not written afterwards. A message that it was
// fetching waits for the next receive, unless the sender is lost: no receive could fetch it, and the
// next one may be meant for a later message.
void PointToPoint::giveUp(Message& message, Status status) {
  if (message.fetch_) {
    group().window().cancel(*message.fetch_);
    if (status.code() != ErrorCode::kPeerLost)
      early_.putBack(message.peer_,
                     {message.number_, message.tag_, message.data_.size(), message.source_, {}});
  }
  end(message, std::move(status));
}

// kPeerLost: the message cannot move, because its peer is out of the view or has left the group. All
// that the peer sent has been taken in during this round. ok: at least one peer is left. A peer that
// has ended is waited for until the view is without it, so that a caller that learns of a loss sees
// it in the group's active ranks, too.
Status PointToPoint::lost(const Message& message) const {
  const auto isGone = [&](int r) REQUIRES(progressLock_) {
    return pairs_[r].isOut ||
           (message.isSent() ? pairs_[r].left.has_value() : early_.hasSentAll(r));
  };
  if (message.peer_ != kAnySource) {
    if (message.peer_ == group().rank() || !isGone(message.peer_)) return {};
    return {ErrorCode::kPeerLost, titleOf(message) + ": " + group().whyGone(message.peer_)};
  }
  RankTexts reasons;
  for (int r = 0; r < pairs_.size(); ++r) {
    if (r == group().rank()) continue;
    if (!isGone(r)) return {};
    reasons.add(r, group().whyGone(r));
  }
  const auto phrase = [&current = group()](const std::vector<int>& ranks, const std::string& why) {
    return current.nameRanks(ranks) + ": " + why;
  };
  return {ErrorCode::kPeerLost, titleOf(message) + ": nobody is left" +
                                    (reasons.empty() ? "" : ": ") + reasons.join("; ", phrase)};
}

void PointToPoint::end(Message& message, Status status) {
  // Connections end with the group, and a fetch may see that first: then the group's error counts.
  if (const Status usable = group().usable(); !usable.ok() && !status.ok()) status = usable;
  if (message.isSent() && message.region_) pairs_[message.peer_].announced.erase(message.number_);
  message.region_ = MemoryRegion();
  message.hasData_ = nullptr;
  message.owner_.reset();  // no transfer touches the data any more
  message.status_ = std::move(status);
  message.finished_.store(true, std::memory_order_release);
  if (message.onDone_ && message.status_.ok()) message.onDone_();
}

}  // namespace mooncake
