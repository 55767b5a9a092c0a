#include "engine/transports/fabric/rails.h"

#include <algorithm>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <system_error>

#include "base/log.h"
#include "base/signals.h"

namespace mooncake {
namespace {

constexpr size_t kMostReceives = 512;                    // posted with one card
constexpr size_t kPacketsPerRail = 512;                  // that leave
constexpr size_t kCompletions = 64;                      // taken at a time
constexpr auto kRetry = std::chrono::microseconds(100);  // of what a card had no room for
constexpr auto kLongSleep = std::chrono::seconds(10);
constexpr auto kClosedNap = std::chrono::milliseconds(5);  // where there is no card to sleep at

}  // namespace

thread_local const Rails* Rails::isPolling = nullptr;

Result<std::shared_ptr<Rails>> Rails::create(std::vector<std::unique_ptr<Nic>> nics,
                                             const Options& options) {
  if (nics.empty()) return Error{ErrorCode::kUnsupported, "there is no card"};
  size_t bytes = kMostPacketBytes;
  for (const auto& nic : nics)
    bytes = std::min<size_t>(bytes, static_cast<size_t>(nic->limits().mostSendBytes));
  if (bytes <= Packet::kBytes)
    return Error{ErrorCode::kUnsupported, nics[0]->name() + " carries no packets of more than " +
                                              std::to_string(bytes) + " bytes"};
  std::shared_ptr<Rails> rails(new Rails(options));
  rails->provider_ = nics[0]->provider();
  auto pool = PacketPool::create(nics, PacketPool::kReserve + kPacketsPerRail * nics.size(), bytes);
  if (!pool.ok()) return pool.error();
  rails->pool_ = std::move(*pool);
  for (auto& nic : nics) {
    const size_t receives = std::min(nic->limits().receiveDepth, kMostReceives);
    auto buffers = PacketPool::create(std::span(&nic, 1), receives, bytes);
    if (!buffers.ok()) return buffers.error();
    rails->receiving_.push_back(std::move(*buffers));
    auto rail = std::make_unique<Rail>(nic->limits());
    rail->index = rails->rails_.size();
    rail->name = nic->name();
    rail->nic = std::move(nic);
    rail->receives.resize(receives);
    for (size_t i = 0; i < receives; ++i) {
      rail->receives[i].buffer = rails->receiving_.back()->at(i);
      rail->unposted.push_back(&rail->receives[i]);
    }
    rails->rails_.push_back(std::move(rail));
  }
  const size_t threads =
      std::min(options.threads == 0 ? rails->count() : options.threads, rails->count());
  try {
    const BlockedSignals blocked;
    for (size_t i = 0; i < threads; ++i) {
      rails->threads_.emplace_back([raw = rails.get(), i, threads] { raw->run(i, threads); });
      ::pthread_setname_np(rails->threads_.back().native_handle(), "mooncake-nic");
    }
  } catch (const std::system_error& error) {
    return Error{ErrorCode::kExhausted,
                 std::string("cannot start a thread that polls a card: ") + error.what()};
  }
  return rails;
}

Bytes Rails::address(size_t index) const {
  const Rail& rail = *rails_[index];
  std::lock_guard lock(rail.mutex);
  return rail.nic->address();
}

std::shared_ptr<Nic> Rails::card(size_t index, uint64_t& generation) const {
  const Rail& rail = *rails_[index];
  std::lock_guard lock(rail.mutex);
  generation = rail.generation.load(std::memory_order_relaxed);
  return rail.isClosed || stopping_.load(std::memory_order_acquire) ? nullptr : rail.nic;
}

Result<RailPeer> Rails::insert(size_t index, ByteView address) {
  Rail& rail = *rails_[index];
  std::lock_guard lock(rail.mutex);
  if (rail.isClosed || stopping_.load(std::memory_order_acquire))
    return Error{ErrorCode::kAborted, "the card is closed"};
  const auto peer = rail.nic->insert(address);
  if (!peer.ok()) return peer.error();
  ++rail.peers[*peer];
  return RailPeer{*peer, rail.generation.load(std::memory_order_relaxed)};
}

void Rails::release(size_t index, RailPeer peer) {
  Rail& rail = *rails_[index];
  std::lock_guard lock(rail.mutex);
  if (peer.generation != rail.generation.load(std::memory_order_relaxed)) return;
  const auto found = rail.peers.find(peer.number);
  if (found == rail.peers.end() || --found->second > 0) return;
  rail.peers.erase(found);
  if (!stopping_.load(std::memory_order_acquire)) rail.nic->remove(peer.number);
}

// ---- what leaves

RailShare::RailShare(Rails& rails) : rails_(rails), owners_(rails.count()) {
  for (const auto& rail : rails_.rails_) {
    std::lock_guard lock(rail->mutex);
    rail->slots.add(owners_[rail->index]);
  }
}

RailShare::~RailShare() {
  for (const auto& rail : rails_.rails_) {
    std::lock_guard lock(rail->mutex);
    rail->slots.remove(owners_[rail->index]);
  }
}

// Under the rail's lock. Ok: it is the card's, until its completion. kInterrupted: its channel has
// its share, or the card has all that it takes. kExhausted: the card does not take it now.
Status Rails::start(Rail& rail, RailOperation& operation) {
  const uint64_t generation = operation.generation();
  const bool isOfAnother =
      generation != 0 && generation != rail.generation.load(std::memory_order_relaxed);
  if (rail.isClosed || isOfAnother) return {ErrorCode::kAborted, "that card is closed"};
  FairShares::Owner& owner = operation.share().owners_[rail.index];
  if (!rail.slots.mayTake(owner)) return {ErrorCode::kInterrupted, {}};
  rail.slots.take(owner);
  Status begun = operation.begin(*rail.nic);
  if (!begun.ok()) rail.slots.giveBack(owner);
  return begun;
}

// Under the rail's lock: to the card, which has begun it, or to those that failed.
void Rails::give(Rail& rail, std::unique_ptr<RailOperation> operation, const Status& begun) {
  if (begun.ok()) {
    operation.release();
  } else {
    rail.failed.push_back(std::move(operation));
  }
}

// Under the rail's lock. Begins the operations that wait and have room, the channels in turn. An
// operation that the card does not take now, or that exceeds its channel's share, holds up no other
// channel. Returns whether the card has refused one: it may take that before a completion comes.
bool Rails::beginWaiting(Rail& rail) {
  bool isRefused = false;
  for (size_t passed = 0; passed < rail.waiting.owners();) {
    const Status begun = start(rail, rail.waiting.front());
    const bool hasShare = begun.code() != ErrorCode::kInterrupted;
    if (hasShare && begun.code() != ErrorCode::kExhausted) {
      passed = 0;
      give(rail, rail.waiting.pop(), begun);
      continue;
    }
    isRefused = isRefused || hasShare;
    if (!rail.isClosed && rail.slots.left() == 0) break;
    rail.waiting.passTurn();
    ++passed;
  }
  return isRefused;
}

void Rails::submit(size_t index, std::unique_ptr<RailOperation> operation) {
  Rail& rail = *rails_[index];
  std::lock_guard lock(rail.mutex);
  if (stopping_.load(std::memory_order_acquire)) return;
  bool isRefused = false;
  if (rail.waiting.empty()) {
    const Status begun = start(rail, *operation);
    isRefused = begun.code() == ErrorCode::kExhausted;
    if (!isRefused && begun.code() != ErrorCode::kInterrupted)
      give(rail, std::move(operation), begun);
  }
  if (operation) {
    const void* owner = &operation->share();
    rail.waiting.push(owner, std::move(operation));
    if (!isRefused && rail.slots.left() > 0) isRefused = beginWaiting(rail);
  }
  // Else a completion comes, and the thread with it.
  if (isRefused || !rail.failed.empty()) rail.nic->wake();
}

// True: something waits that the card may take before a completion comes.
bool Rails::feed(size_t index) {
  Rail& rail = *rails_[index];
  std::deque<std::unique_ptr<RailOperation>> failed;
  bool waits;
  {
    std::lock_guard lock(rail.mutex);
    waits = beginWaiting(rail);
    failed.swap(rail.failed);
  }
  for (const auto& operation : failed) operation->end({.error = NicError::kDevice});
  return waits;
}

// ---- who polls

void Rails::run(size_t first, size_t step) {
  isPolling = this;
  std::vector<NicCompletion> room(kCompletions);
  const bool isAlone = first + step >= count();  // with one card
  while (!stopping_.load(std::memory_order_acquire)) {
    size_t done = 0;
    bool waits = false;
    for (size_t i = first; i < count(); i += step) {
      renewWhereDue(i);
      if (!rails_[i]->isClosed) done += serve(i, room);
      waits = feed(i) || (!rails_[i]->isClosed && !rails_[i]->unposted.empty()) || waits;
    }
    const auto now = Clock::now();
    const auto due = tick(now);
    if (done > 0) continue;
    auto until = std::min(due, now + kLongSleep);
    if (waits) until = std::min<Clock::time_point>(until, now + kRetry);
    if (!isAlone) {
      sleepAtAll(first, step, until);
    } else if (rails_[first]->isClosed) {
      std::this_thread::sleep_until(std::min<Clock::time_point>(until, now + kClosedNap));
    } else {
      rails_[first]->nic->wait(Deadline::at(until));
    }
  }
}

// Until one of the thread's cards may have something.
void Rails::sleepAtAll(size_t first, size_t step, Clock::time_point until) {
  std::vector<pollfd> events;
  bool yields = false;
  for (size_t i = first; i < count(); i += step) {
    if (rails_[i]->isClosed) {
      until = std::min<Clock::time_point>(until, Clock::now() + kClosedNap);
      continue;
    }
    const NicSleep sleep = rails_[i]->nic->fallAsleep(Deadline::at(until));
    until = std::min(until, sleep.until);
    yields = yields || sleep.yields;
    for (const int descriptor : sleep.descriptors) {
      if (descriptor >= 0) events.push_back({descriptor, POLLIN, 0});
    }
  }
  const std::chrono::nanoseconds left = Deadline::at(until).left();
  if (yields) {
    ::sched_yield();
  } else if (left.count() > 0) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
    const timespec limit{seconds.count(), (left - seconds).count()};
    ::ppoll(events.data(), events.size(), &limit, nullptr);
  }
  for (size_t i = first; i < count(); i += step) {
    if (!rails_[i]->isClosed) rails_[i]->nic->awake();
  }
}

size_t Rails::serve(size_t index, std::span<NicCompletion> room) {
  Rail& rail = *rails_[index];
  if (!rail.unposted.empty()) post(rail);
  const size_t done = rail.nic->poll(room);
  for (const NicCompletion& completion : room.first(done)) {
    if (completion.kind == NicCompletion::Kind::kReceived) {
      onReceived(index, completion);
      continue;
    }
    std::unique_ptr<RailOperation> operation(static_cast<RailOperation*>(completion.context));
    {
      std::lock_guard lock(rail.mutex);
      rail.slots.giveBack(operation->share().owners_[index]);
    }
    if (completion.abandoned) {
      keep(rail, std::move(operation), completion);
    } else {
      operation->end(completion);
    }
  }
  return done;
}

void Rails::post(Rail& rail) {
  while (!rail.unposted.empty() && !stopping_.load(std::memory_order_relaxed)) {
    Receive* receive = rail.unposted.back();
    const PacketPool& pool = *receiving_[rail.index];
    if (!rail.nic->receive(pool.as(0, receive->buffer, pool.bufferBytes()), receive).ok()) return;
    rail.unposted.pop_back();
  }
}

void Rails::onReceived(size_t index, const NicCompletion& completion) {
  Rail& rail = *rails_[index];
  auto* receive = static_cast<Receive*>(completion.context);
  rail.unposted.push_back(receive);
  if (completion.error != NicError::kNone || completion.bytes > packetBytes()) return;
  ByteReader in(ByteView(receive->buffer, completion.bytes));
  const auto packet = Packet::decode(in);
  std::shared_ptr<PacketSink> sink;
  if (packet.ok()) {
    std::shared_lock lock(sinksMutex_);
    if (const auto found = sinks_.find(packet->incarnation); found != sinks_.end())
      sink = found->second.lock();
  }
  if (sink) {
    sink->onPacket(index, *packet, in.getRaw(in.left()));
  } else {
    dropped_.fetch_add(1, std::memory_order_relaxed);
  }
  post(rail);
}

// ---- whose packets, and who is ticked

void Rails::add(uint64_t incarnation, std::weak_ptr<PacketSink> sink) {
  std::lock_guard lock(sinksMutex_);
  sinks_[incarnation] = std::move(sink);
}

void Rails::remove(uint64_t incarnation) {
  std::lock_guard lock(sinksMutex_);
  sinks_.erase(incarnation);
}

void Rails::activate(const std::shared_ptr<PacketSink>& sink) {
  {
    std::lock_guard lock(activeMutex_);
    const bool isFirst = active_.empty();
    active_.push_back(sink);
    nextTick_ = std::min<Clock::time_point>(nextTick_, Clock::now() + kTick);
    if (!isFirst) return;
  }
  // Any of the threads: whoever is awake ticks.
  std::lock_guard lock(rails_[0]->mutex);
  rails_[0]->nic->wake();
}

// When it is due again.
Clock::time_point Rails::tick(Clock::time_point now) {
  std::vector<std::weak_ptr<PacketSink>> due;
  {
    std::lock_guard lock(activeMutex_);
    if (now < nextTick_) return nextTick_;
    due.swap(active_);
    nextTick_ = due.empty() ? Clock::time_point::max() : now + kTick;
  }
  std::erase_if(due, [&](const auto& weak) {
    const auto sink = weak.lock();
    return !sink || !sink->tick(now);
  });
  std::lock_guard lock(activeMutex_);
  active_.insert(active_.end(), due.begin(), due.end());
  if (!active_.empty()) nextTick_ = std::min<Clock::time_point>(nextTick_, now + kTick);
  return nextTick_;
}

void Rails::stop() {
  std::call_once(stopped_, [this] {
    stopping_.store(true, std::memory_order_release);
    for (const auto& rail : rails_) {
      std::lock_guard lock(rail->mutex);
      rail->nic->wake();
    }
    for (auto& thread : threads_) thread.join();
    for (size_t i = 0; i < rails_.size(); ++i) {
      closeCard(i);
      feed(i);
    }
    // The memory stays as long as somebody holds a packet, what the cards know of it does not.
    receiving_.clear();
    pool_->unregister();
  });
}

}  // namespace mooncake
