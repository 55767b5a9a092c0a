#include "wires/cards/rails.h"

#include <algorithm>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <system_error>

#include "base/log.h"
#include "base/signals.h"

namespace mooncake {
namespace {

constexpr size_t kMostReceives = 512;    // posted with one card
constexpr size_t kPacketsPerRail = 512;  // buffers of packets that leave
constexpr size_t kCompletions = 64;      // taken in one call
// Pause before an operation is given again to a card that had no room for it.
constexpr auto kRetry = std::chrono::microseconds(100);
constexpr auto kLongSleep = std::chrono::seconds(10);
constexpr auto kClosedNap = std::chrono::milliseconds(5);  // while a card is closed
// How long the polling thread may take to close a card.
constexpr auto kPatience = std::chrono::seconds(10);

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
  auto pool =
      RegisteredPool::create(nics, PacketPool::kReserve + kPacketsPerRail * nics.size(), bytes);
  if (!pool.ok()) return pool.error();
  rails->pool_ = std::move(*pool);
  for (auto& nic : nics) {
    const size_t receives = std::min(nic->limits().receiveDepth, kMostReceives);
    auto buffers = RegisteredPool::create(std::span(&nic, 1), receives, bytes);
    if (!buffers.ok()) return buffers.error();
    rails->rails_.push_back(
        std::make_unique<Rail>(rails->count(), std::move(nic), std::move(*buffers)));
    rails->renewals_.emplace_back(*rails->rails_.back(), *rails->pool_, rails->sinks_,
                                  rails->options_.reopen);
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

// ---- shares of the rails' places

RailShare::RailShare(Rails& rails) : rails_(rails), owners_(rails.count()) {
  for (size_t i = 0; i < rails_.count(); ++i) rails_[i].addOwner(owners_[i]);
}

RailShare::~RailShare() {
  for (size_t i = 0; i < rails_.count(); ++i) rails_[i].removeOwner(owners_[i]);
}

// ---- the polling threads

void Rails::run(size_t first, size_t step) {
  isPolling = this;
  std::vector<NicCompletion> room(kCompletions);
  const bool isAlone = first + step >= count();  // with one card
  while (!stopping_.load(std::memory_order_acquire)) {
    size_t done = 0;
    bool waits = false;
    for (size_t i = first; i < count(); i += step) {
      Rail& rail = *rails_[i];
      if (renewals_[i].renewWhereDue()) tellOfRenewal(i);
      if (!rail.isClosed()) done += rail.serve(room, sinks_);
      waits = rail.feed() || (!rail.isClosed() && rail.lacksReceives()) || waits;
    }
    const auto now = Clock::now();
    const auto due = tick(now);
    if (done > 0) continue;
    auto until = std::min(due, now + kLongSleep);
    if (waits) until = std::min<Clock::time_point>(until, now + kRetry);
    if (!isAlone) {
      sleepAtAll(first, step, until);
    } else if (rails_[first]->isClosed()) {
      std::this_thread::sleep_until(std::min<Clock::time_point>(until, now + kClosedNap));
    } else {
      rails_[first]->nic().wait(Deadline::at(until));
    }
  }
}

// Sleeps until one of the thread's cards may have a completion.
void Rails::sleepAtAll(size_t first, size_t step, Clock::time_point until) {
  std::vector<pollfd> events;
  bool yields = false;
  for (size_t i = first; i < count(); i += step) {
    if (rails_[i]->isClosed()) {
      until = std::min<Clock::time_point>(until, Clock::now() + kClosedNap);
      continue;
    }
    const NicSleep sleep = rails_[i]->nic().fallAsleep(Deadline::at(until));
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
    if (!rails_[i]->isClosed()) rails_[i]->nic().awake();
  }
}

// ---- retired cards

void Rails::retireNow(std::span<const Retired> which) {
  for (const Retired& one : which) retire(one);
  if (isPolling == this) return;
  const auto deadline = Deadline::after(kPatience);
  for (const Retired& one : which) {
    if (!rails_[one.rail]->awaitEndOf(one.generation, deadline))
      log(LogLevel::kError, "fabric", "card ", name(one.rail), " is not closed within 10 s");
  }
}

void Rails::tellOfRenewal(size_t rail) {
  if (onRenewal_) onRenewal_(rail);
  for (const auto& sink : sinks_.all()) sink->onRenewed(rail);
}

// ---- ticks

void Rails::activate(const std::shared_ptr<PacketSink>& sink) {
  {
    Lock lock(activeMutex_);
    const bool isFirst = active_.empty();
    active_.push_back(sink);
    nextTick_ = std::min<Clock::time_point>(nextTick_, Clock::now() + kTick);
    if (!isFirst) return;
  }
  // Any of the threads will do: each of them ticks when it is awake.
  rails_[0]->wake();
}

// Returns when the next tick is due.
Clock::time_point Rails::tick(Clock::time_point now) {
  std::vector<std::weak_ptr<PacketSink>> due;
  {
    Lock lock(activeMutex_);
    if (now < nextTick_) return nextTick_;
    due.swap(active_);
    nextTick_ = due.empty() ? Clock::time_point::max() : now + kTick;
  }
  std::erase_if(due, [&](const auto& weak) {
    const auto sink = weak.lock();
    return !sink || !sink->tick(now);
  });
  Lock lock(activeMutex_);
  active_.insert(active_.end(), due.begin(), due.end());
  if (!active_.empty()) nextTick_ = std::min<Clock::time_point>(nextTick_, now + kTick);
  return nextTick_;
}

void Rails::stop() {
  std::call_once(stopped_, [this] {
    stopping_.store(true, std::memory_order_release);
    for (const auto& rail : rails_) rail->stop();
    for (auto& thread : threads_) thread.join();
    for (size_t i = 0; i < rails_.size(); ++i) {
      renewals_[i].close();
      rails_[i]->feed();
    }
    // The memory stays for as long as a channel holds a packet. Its registrations do not.
    for (const auto& rail : rails_) rail->dropReceiving();
    pool_->unregister();
  });
}

}  // namespace mooncake
