#include <algorithm>

#include "base/log.h"
#include "engine/transports/fabric/rails.h"

// What becomes of a card that is retired: closed by the thread that polls it, and opened anew.
namespace mooncake {
namespace {

constexpr size_t kCompletions = 64;  // taken at a time
// For a card to end what is under way when it is closed.
constexpr auto kClosing = std::chrono::seconds(5);
// For the thread that polls to have closed it.
constexpr auto kPatience = std::chrono::seconds(10);
constexpr auto kReopenPause = std::chrono::milliseconds(500);  // after it could not be opened
// Of packets whose buffers a card may still read: from here on it gives them back by being closed.
constexpr size_t kMostKept = 64;

}  // namespace

void Rails::retire(Retired which) {
  Rail& rail = *rails_[which.rail];
  std::lock_guard lock(rail.mutex);
  if (rail.generation.load(std::memory_order_relaxed) != which.generation) return;
  rail.mustRetire.store(true, std::memory_order_release);
  rail.nic->wake();
}

void Rails::retireNow(std::span<const Retired> which) {
  for (const Retired& one : which) retire(one);
  if (isPolling == this) return;
  const auto deadline = Deadline::after(kPatience);
  for (const Retired& one : which) {
    Rail& rail = *rails_[one.rail];
    std::unique_lock lock(rail.mutex);
    const auto isOver = [&] {
      return rail.generation.load(std::memory_order_relaxed) != one.generation;
    };
    if (!rail.retired.wait_until(lock, deadline.when(), isOver))
      log(LogLevel::kError, "fabric", "card ", rail.name, " is not closed within 10 s");
  }
}

void Rails::renewWhereDue(size_t index) {
  Rail& rail = *rails_[index];
  if (rail.mustRetire.load(std::memory_order_acquire)) {
    closeCard(index);
    retired_.fetch_add(1, std::memory_order_relaxed);
    rail.reopenAt = Clock::now();
  }
  if (!rail.isClosed || !options_.reopen || Clock::now() < rail.reopenAt) return;
  if (!reopen(index)) {
    rail.reopenAt = Clock::now() + kReopenPause;
    return;
  }
  if (onRenewal_) onRenewal_(index);
  std::vector<std::shared_ptr<PacketSink>> sinks;
  {
    std::shared_lock lock(sinksMutex_);
    for (const auto& [incarnation, weak] : sinks_) {
      if (auto sink = weak.lock()) sinks.push_back(std::move(sink));
    }
  }
  for (const auto& sink : sinks) sink->onRenewed(index);
}

// Whoever waits for the end of its generation goes on when nothing of it moves; what was under way
// is ended behind that.
void Rails::closeCard(size_t index) {
  Rail& rail = *rails_[index];
  {
    std::lock_guard lock(rail.mutex);
    rail.mustRetire.store(false, std::memory_order_relaxed);
    if (rail.isClosed) return;
    rail.isClosed = true;
    while (!rail.waiting.empty()) rail.failed.push_back(rail.waiting.pop());
    rail.nic->close();
    rail.peers.clear();
    rail.generation.fetch_add(1, std::memory_order_acq_rel);
    rail.retired.notify_all();
  }
  endAll(index);
}

void Rails::endAll(size_t index) {
  Rail& rail = *rails_[index];
  std::vector<NicCompletion> room(kCompletions);
  const auto isEmpty = [&] {
    std::lock_guard lock(rail.mutex);
    return rail.underWay() == 0;
  };
  for (const auto deadline = Deadline::after(kClosing); !isEmpty();) {
    if (serve(index, room) > 0) continue;
    if (deadline.passed()) {
      log(LogLevel::kWarning, "fabric", "card ", rail.name, " does not end what is under way");
      break;
    }
    rail.nic->wait(Deadline::after(std::chrono::microseconds(100)));
  }
  for (auto& [operation, how] : std::exchange(rail.abandoned, {})) {
    how.abandoned = false;
    if (operation->endsWithTheCard()) operation->end(how);
  }
  feed(index);
}

// The card has ended it, and may still use its memory.
void Rails::keep(Rail& rail, std::unique_ptr<RailOperation> operation, const NicCompletion& how) {
  if (rail.isClosed) {
    NicCompletion over = how;
    over.abandoned = false;
    return operation->end(over);
  }
  const bool isUrgent = operation->endsWithTheCard();
  if (!isUrgent) operation->end(how);
  rail.abandoned.emplace_back(std::move(operation), how);
  if (isUrgent || rail.abandoned.size() >= kMostKept)
    rail.mustRetire.store(true, std::memory_order_release);
}

bool Rails::reopen(size_t index) {
  Rail& rail = *rails_[index];
  const auto fails = [&](const Error& why) {
    log(LogLevel::kWarning, "fabric", "card ", rail.name, " cannot be opened anew: ", why.message);
    return false;
  };
  auto made = options_.reopen(index);
  if (!made.ok()) return fails(made.error());
  auto sending = pool_->registerWith(**made);
  if (!sending.ok()) return fails(sending.error());
  auto receiving = receiving_[index]->registerWith(**made);
  if (!receiving.ok()) return fails(receiving.error());
  std::shared_ptr<Nic> old;  // goes when nothing is registered with it any more
  {
    std::lock_guard lock(rail.mutex);
    pool_->renew(index, std::move(*sending));
    receiving_[index]->renew(0, std::move(*receiving));
    old = std::exchange(rail.nic, std::shared_ptr<Nic>(std::move(*made)));
    rail.isClosed = false;
  }
  rail.unposted.clear();
  for (Receive& receive : rail.receives) rail.unposted.push_back(&receive);
  log(LogLevel::kInfo, "fabric", "card ", rail.name, " was closed, and opened anew");
  return true;
}

}  // namespace mooncake
