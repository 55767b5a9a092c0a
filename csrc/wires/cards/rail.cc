#include "wires/cards/rail.h"

#include <utility>

namespace mooncake {
namespace {

// Number of abandoned packets after which the card is closed, so that their buffers come back.
constexpr size_t kMostKept = 64;

}  // namespace

Rail::Rail(size_t index, std::shared_ptr<Nic> nic, std::unique_ptr<RegisteredPool> receiving)
    : index_(index),
      name_(nic->name()),
      limits_(nic->limits()),
      nic_(std::move(nic)),
      slots_(limits_.sendDepth),
      receiving_(std::move(receiving)),
      receives_(receiving_->buffers().count()) {
  for (size_t i = 0; i < receives_.size(); ++i) {
    receives_[i].buffer = receiving_->buffers().at(i);
    unposted_.push_back(&receives_[i]);
  }
}

// ---- any thread

void Rail::addOwner(FairShares::Owner& owner) {
  Lock lock(mutex_);
  slots_.add(owner);
}

void Rail::removeOwner(FairShares::Owner& owner) {
  Lock lock(mutex_);
  slots_.remove(owner);
}

Bytes Rail::address() const {
  Lock lock(mutex_);
  return nic_->address();
}

std::shared_ptr<Nic> Rail::card(uint64_t& generation) const {
  Lock lock(mutex_);
  generation = generation_.load(std::memory_order_relaxed);
  return isClosed_ || stopping_.load(std::memory_order_acquire) ? nullptr : nic_;
}

Result<RailPeer> Rail::insert(ByteView address) {
  Lock lock(mutex_);
  if (isClosed_ || stopping_.load(std::memory_order_acquire))
    return Error{ErrorCode::kAborted, "the card is closed"};
  const auto peer = nic_->insert(address);
  if (!peer.ok()) return peer.error();
  ++peers_[*peer];
  return RailPeer{*peer, generation_.load(std::memory_order_relaxed)};
}

void Rail::release(RailPeer peer) {
  Lock lock(mutex_);
  if (peer.generation != generation_.load(std::memory_order_relaxed)) return;
  const auto found = peers_.find(peer.number);
  if (found == peers_.end() || --found->second > 0) return;
  peers_.erase(found);
  if (!stopping_.load(std::memory_order_acquire)) nic_->remove(peer.number);
}

void Rail::wake() {
  Lock lock(mutex_);
  nic_->wake();
}

void Rail::stop() {
  Lock lock(mutex_);
  stopping_.store(true, std::memory_order_release);
  nic_->wake();
}

// ---- operations

// Ok: the card has the operation until its completion. kInterrupted: its channel has its share, or
// the card has all that it takes. kExhausted: the card does not take the operation now.
Status Rail::start(RailOperation& operation) {
  const uint64_t generation = operation.generation();
  const bool isOfAnother =
      generation != 0 && generation != generation_.load(std::memory_order_relaxed);
  if (isClosed_ || isOfAnother) return {ErrorCode::kAborted, "that card is closed"};
  FairShares::Owner& owner = operation.share().owners_[index_];
  if (!slots_.mayTake(owner)) return {ErrorCode::kInterrupted, {}};
  slots_.take(owner);
  Status begun = operation.begin(*nic_);
  if (!begun.ok()) slots_.giveBack(owner);
  return begun;
}

// Leaves the operation to the card if that has begun it, else to the failed ones.
void Rail::give(std::unique_ptr<RailOperation> operation, const Status& begun) {
  if (begun.ok()) {
    operation.release();
  } else {
    failed_.push_back(std::move(operation));
  }
}

// Begins the operations that wait and have room, the channels in turn. An operation that the card
// does not take now, or that exceeds its channel's share, holds up no other channel. Returns
// whether the card has refused one: it may take that before a completion comes.
bool Rail::beginWaiting() {
  bool isRefused = false;
  for (size_t passed = 0; passed < waiting_.owners();) {
    const Status begun = start(waiting_.front());
    const bool hasShare = begun.code() != ErrorCode::kInterrupted;
    if (hasShare && begun.code() != ErrorCode::kExhausted) {
      passed = 0;
      give(waiting_.pop(), begun);
      continue;
    }
    isRefused = isRefused || hasShare;
    if (!isClosed_ && slots_.left() == 0) break;
    waiting_.passTurn();
    ++passed;
  }
  return isRefused;
}

void Rail::submit(std::unique_ptr<RailOperation> operation) {
  Lock lock(mutex_);
  if (stopping_.load(std::memory_order_acquire)) return;
  bool isRefused = false;
  if (waiting_.empty()) {
    const Status begun = start(*operation);
    isRefused = begun.code() == ErrorCode::kExhausted;
    if (!isRefused && begun.code() != ErrorCode::kInterrupted) give(std::move(operation), begun);
  }
  if (operation) {
    const void* owner = &operation->share();
    waiting_.push(owner, std::move(operation));
    if (!isRefused && slots_.left() > 0) isRefused = beginWaiting();
  }
  // Otherwise a completion comes, and the polling thread with it.
  if (isRefused || !failed_.empty()) nic_->wake();
}

bool Rail::feed() {
  std::deque<std::unique_ptr<RailOperation>> failed;
  bool waits;
  {
    Lock lock(mutex_);
    waits = beginWaiting();
    failed.swap(failed_);
  }
  for (const auto& operation : failed) operation->end({.error = NicError::kDevice});
  return waits;
}

size_t Rail::serve(std::span<NicCompletion> room, PacketSinks& sinks) {
  if (!unposted_.empty()) post();
  const size_t done = nic_->poll(room);
  for (const NicCompletion& completion : room.first(done)) {
    if (completion.kind == NicCompletion::Kind::kReceived) {
      onReceived(completion, sinks);
      continue;
    }
    std::unique_ptr<RailOperation> operation(static_cast<RailOperation*>(completion.context));
    {
      Lock lock(mutex_);
      slots_.giveBack(operation->share().owners_[index_]);
    }
    if (completion.abandoned) {
      keep(std::move(operation), completion);
    } else {
      operation->end(completion);
    }
  }
  return done;
}

// ---- received packets

void Rail::post() {
  while (!unposted_.empty() && !stopping_.load(std::memory_order_relaxed)) {
    Receive* receive = unposted_.back();
    const size_t bytes = receiving_->buffers().bufferBytes();
    if (!nic_->receive(receiving_->as(0, receive->buffer, bytes), receive).ok()) return;
    unposted_.pop_back();
  }
}

void Rail::onReceived(const NicCompletion& completion, PacketSinks& sinks) {
  auto* receive = static_cast<Receive*>(completion.context);
  unposted_.push_back(receive);
  if (completion.error != NicError::kNone || completion.bytes > receiving_->buffers().bufferBytes())
    return;
  sinks.deliver(index_, ByteView(receive->buffer, completion.bytes));
  post();
}

// ---- closing

void Rail::askToClose(uint64_t generation) {
  Lock lock(mutex_);
  if (generation_.load(std::memory_order_relaxed) != generation) return;
  mustClose_.store(true, std::memory_order_release);
  nic_->wake();
}

bool Rail::awaitEndOf(uint64_t generation, Deadline deadline) {
  Lock lock(mutex_);
  return ended_.wait_until(mutex_, deadline.when(), [&]() REQUIRES(mutex_) {
    return generation_.load(std::memory_order_relaxed) != generation;
  });
}

bool Rail::close() {
  Lock lock(mutex_);
  mustClose_.store(false, std::memory_order_relaxed);
  if (isClosed_) return false;
  isClosed_ = true;
  while (!waiting_.empty()) failed_.push_back(waiting_.pop());
  nic_->close();
  peers_.clear();
  generation_.fetch_add(1, std::memory_order_acq_rel);
  ended_.notify_all();
  return true;
}

bool Rail::isIdle() const {
  Lock lock(mutex_);
  return underWay() == 0;
}

// The card has ended the operation, and may still use its memory.
void Rail::keep(std::unique_ptr<RailOperation> operation, const NicCompletion& how) {
  if (isClosed_) {
    NicCompletion over = how;
    over.abandoned = false;
    return operation->end(over);
  }
  const bool isUrgent = operation->endsWithTheCard();
  if (!isUrgent) operation->end(how);
  abandoned_.emplace_back(std::move(operation), how);
  if (isUrgent || abandoned_.size() >= kMostKept) mustClose_.store(true, std::memory_order_release);
}

void Rail::endAbandoned() {
  for (auto& [operation, how] : std::exchange(abandoned_, {})) {
    how.abandoned = false;
    if (operation->endsWithTheCard()) operation->end(how);
  }
}

std::shared_ptr<Nic> Rail::reopen(std::shared_ptr<Nic> nic, RegisteredPool& sending,
                                  std::unique_ptr<NicMemory> sendingMemory,
                                  std::unique_ptr<NicMemory> receivingMemory) {
  std::shared_ptr<Nic> old;
  {
    Lock lock(mutex_);
    sending.renew(index_, std::move(sendingMemory));
    receiving_->renew(0, std::move(receivingMemory));
    old = std::exchange(nic_, std::move(nic));
    isClosed_ = false;
  }
  unposted_.clear();
  for (Receive& receive : receives_) unposted_.push_back(&receive);
  return old;
}

}  // namespace mooncake
