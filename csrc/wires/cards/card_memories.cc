#include "wires/cards/card_memories.h"

#include <algorithm>
#include <pthread.h>
#include <system_error>

#include "base/log.h"
#include "base/signals.h"

namespace mooncake {
namespace {

// How long operations of ours may hold a registration: they move at most 1 MiB each.
constexpr auto kGrace = std::chrono::milliseconds(50);
constexpr auto kLook = std::chrono::microseconds(50);
// Least size of a region that is registered by several threads. With a smaller one they cost more
// than they save.
constexpr size_t kParallelFrom = size_t(1) << 20;

// Rights by which cards of peers may write. With kLanding only peers that were asked to.
constexpr uint32_t kWritten = kRemoteWrite | kLanding;

bool isReadBack(uint32_t rights) { return (rights & kReadBack) != 0 && (rights & kWritten) != 0; }

// A card that reads back what it has written needs a key that allows both.
uint32_t accessOf(uint32_t rights) {
  const bool isRead = (rights & kRemoteRead) != 0 || isReadBack(rights);
  return (isRead ? static_cast<uint32_t>(NicAccess::kRemoteRead) : 0) |
         ((rights & kWritten) != 0 ? static_cast<uint32_t>(NicAccess::kRemoteWrite) : 0);
}

// Cards of both ends have one provider, so our cards tell how capable a peer's cards are.
Status checkReadBack(const Nic& nic, uint32_t rights) {
  if (!isReadBack(rights) || (nic.limits().remoteRead && nic.limits().closeEndsReads)) return {};
  return {ErrorCode::kUnsupported,
          "network card " + nic.name() + ", provider " + nic.provider() +
              ": kernels may miss bytes that it writes to this device's memory, and it cannot read "
              "them back"};
}

}  // namespace

CardMemories::OnCard::~OnCard() {
  memory_.reset();
  landing_.reset();
  isGone_->store(true, std::memory_order_release);
}

CardMemories::CardMemories(RegionTable& regions, std::shared_ptr<Rails> rails, const char* name)
    : table_(regions), rails_(std::move(rails)), name_(name) {
  table_.watch(*this);
}

CardMemories::~CardMemories() { stop(); }

void CardMemories::stop() {
  {
    Lock lock(mutex_);
    if (std::exchange(isStopped_, true)) return;
    changed_.notify_all();
  }
  table_.unwatch(*this);
  if (thread_.joinable()) thread_.join();
  std::map<uint64_t, Region> regions;
  std::deque<std::function<void()>> tasks;
  Lock lock(mutex_);
  regions.swap(regions_);
  tasks.swap(tasks_);
}

// ---- registered regions

std::shared_ptr<const CardMemories::OnCard> CardMemories::registerWith(size_t card,
                                                                       std::span<std::byte> memory,
                                                                       uint32_t rights) {
  uint64_t generation = 0;
  auto nic = rails_->card(card, generation);
  if (!nic) return nullptr;
  auto made = std::make_shared<OnCard>(nic, generation);
  const NicLimits& limits = nic->limits();
  if (limits.mostRmaBytes == 0) return made;
  // Two registrations if the keys of a peer that is asked must allow more than other keys. Cards
  // that read by themselves ask no peer, so no key of theirs has to allow that.
  const bool lands = !limits.closeEndsReads && (rights & kWritten) != 0;
  const bool isApart = lands && (rights & kRemoteWrite) == 0;
  using Registered = Result<std::shared_ptr<const NicRegistration>>;
  const Status able = checkReadBack(*nic, rights);
  auto registered = able.ok()
                        ? NicRegistrations({nic.get()}).add(memory, accessOf(rights & ~kLanding))
                        : Registered(able.error());
  auto landing = isApart && registered.ok()
                     ? NicRegistrations({nic.get()}).add(memory, accessOf(rights))
                     : registered;
  if (landing.ok()) {
    made->memory_ = std::move(*registered);
    if (lands) made->landing_ = isApart ? std::move(*landing) : made->memory_;
    if (isReadBack(rights)) tellReadBack();
    return made;
  }
  Lock lock(mutex_);
  if (!std::exchange(hasToldFailure_, true)) {
    log(LogLevel::kWarning, name_, "memory of ", memory.size(),
        " bytes is copied by the processor: ", landing.error().message);
  }
  return made;
}

void CardMemories::tellReadBack() {
  Lock lock(mutex_);
  if (std::exchange(hasToldReadBack_, true)) return;
  log(LogLevel::kInfo, name_, "kernels may see counts ahead of bytes that cards have written to a ",
      "device's memory, so each card reads from there before it reports them");
}

void CardMemories::onAdded(uint64_t key, std::span<std::byte> memory, uint32_t rights) {
  if (memory.empty()) return;
  Region region{.memory = memory, .rights = rights, .cards = {}, .holders = {}};
  region.cards.resize(rails_->count());
  const auto one = [&](size_t card) { region.cards[card] = registerWith(card, memory, rights); };
  std::vector<std::thread> threads;
  size_t onThreads = 0;
  if (memory.size() >= kParallelFrom) {
    BlockedSignals blocked;
    try {
      for (; onThreads + 1 < rails_->count(); ++onThreads) threads.emplace_back(one, onThreads);
    } catch (const std::system_error&) {
      // No more threads: this thread registers with the other cards.
    }
  }
  for (size_t card = onThreads; card < rails_->count(); ++card) one(card);
  for (std::thread& thread : threads) thread.join();
  bool isAnyStale = false;
  {
    Lock lock(mutex_);
    if (isStopped_) return;
    for (size_t card = 0; card < region.cards.size(); ++card)
      isAnyStale = isAnyStale || isStale(region, card);
    byAddress_.emplace(memory.data(), key);
    regions_.emplace(key, std::move(region));
  }
  if (isAnyStale) post(nullptr);
}

bool CardMemories::isStale(const Region& region, size_t card) const {
  const auto& on = region.cards[card];
  return !on || on->generation() != rails_->generation(card);
}

// Returns a region around the range with one of these rights; 0: with any rights. Looks at regions
// that begin at the nearest address.
const CardMemories::Region* CardMemories::regionOf(std::span<const std::byte> range,
                                                   uint32_t rights, uint64_t& key) const {
  const auto behind = byAddress_.upper_bound(range.data());
  if (behind == byAddress_.begin()) return nullptr;
  const auto first = byAddress_.lower_bound(std::prev(behind)->first);
  for (auto at = first; at != behind; ++at) {
    const Region& region = regions_.find(at->second)->second;
    const auto offset = static_cast<uint64_t>(range.data() - region.memory.data());
    const bool isInside =
        offset <= region.memory.size() && range.size() <= region.memory.size() - offset;
    if (!isInside || (rights != 0 && (region.rights & rights) == 0)) continue;
    key = at->second;
    return &region;
  }
  return nullptr;
}

std::optional<CardMemories::Local> CardMemories::find(std::span<const std::byte> range) {
  Lock lock(mutex_);
  uint64_t key = 0;
  const Region* region = regionOf(range, 0, key);
  if (!region) return std::nullopt;
  const auto offset = static_cast<uint64_t>(range.data() - region->memory.data());
  Local local{
      .use = table_.open(key, offset, range.size(), 0), .offset = offset, .cards = region->cards};
  if (!local.use) return std::nullopt;
  return local;
}

std::optional<CardMemories::Landing> CardMemories::landing(std::span<const std::byte> range) {
  Lock lock(mutex_);
  uint64_t key = 0;
  const Region* region = regionOf(range, kWritten, key);
  if (!region) return std::nullopt;
  const auto isThere = [](const auto& on) { return on && on->landing(); };
  if (std::none_of(region->cards.begin(), region->cards.end(), isThere)) return std::nullopt;
  return Landing{key, static_cast<uint64_t>(range.data() - region->memory.data())};
}

std::vector<uint64_t> CardMemories::keys(size_t most) {
  Lock lock(mutex_);
  std::vector<uint64_t> keys;
  for (const auto& [key, region] : regions_) {
    if (keys.size() < most && (region.rights & kRemoteWrite) != 0) keys.push_back(key);
  }
  return keys;
}

// ---- holders of keys

control::Grant CardMemories::grant(uint64_t key, const std::shared_ptr<KeyHolder>& holder,
                                   bool isAsked) {
  control::Grant grant{.region = key, .rights = 0, .bytes = 0, .cards = {}};
  Lock lock(mutex_);
  const auto found = regions_.find(key);
  if (found == regions_.end() || isStopped_) return grant;
  Region& region = found->second;
  // A region that is just being revoked counts as gone.
  if (!table_.open(key, 0, region.memory.size(), 0)) return grant;
  const uint32_t landing = isAsked ? uint32_t(kLanding) : 0;
  grant.rights = region.rights & (kRemoteRead | kRemoteWrite | landing);
  if ((grant.rights & kWritten) != 0) grant.rights |= region.rights & kReadBack;
  grant.bytes = region.memory.size();
  size_t all = 0;
  for (size_t card = 0; card < region.cards.size(); ++card) {
    auto& pieces = grant.cards.emplace_back();
    const NicLimits& limits = rails_->limits(card);
    const bool isAble = (limits.remoteRead || (grant.rights & kRemoteRead) == 0) &&
                        (limits.remoteWrite || (grant.rights & kWritten) == 0);
    if (grant.rights == 0 || !isAble || isStale(region, card) || !region.cards[card]->memory())
      continue;
    const auto* keys = region.cards[card]->memory();
    if ((grant.rights & kLanding) != 0 && region.cards[card]->landing())
      keys = region.cards[card]->landing();
    const auto registered = keys->pieces(0);
    if ((all += registered.size()) > control::kMostPieces) break;
    for (const auto& piece : registered)
      pieces.push_back({.offset = piece.offset,
                        .bytes = piece.memory->memory().size(),
                        .key = piece.memory->key()});
  }
  Holder& told = region.holders[holder.get()];
  told.end = holder;
  told.hasKeys = told.hasKeys || all > 0;
  if (all > 0 && !std::exchange(hasToldUse_, true))
    log(LogLevel::kInfo, name_, "cards move bytes by themselves: peers reach registered memory");
  return grant;
}

void CardMemories::forget(const KeyHolder* holder) {
  Lock lock(mutex_);
  for (auto& [key, region] : regions_) region.holders.erase(holder);
}

CardMemories::Detached CardMemories::begin() {
  const uint64_t number = ++lastDetached_;
  unfinished_.insert(number);
  return {.number = number, .ones = {}};
}

void CardMemories::detach(Region& region, size_t card, Detached& detached) {
  auto on = std::exchange(region.cards[card], nullptr);
  if (!on || !on->memory() || on->generation() != rails_->generation(card)) return;
  const auto isGone = on->isGone_;
  detached.ones.push_back({.card = {card, on->generation()},
                           .memory = std::move(on),
                           .isGone = isGone,
                           .stopsByItself = rails_->limits(card).withdrawalStops});
}

// When it returns, no registration can be reached any more that any thread detached before.
void CardMemories::finish(Detached detached) {
  std::vector<Rails::Retired> retire;
  for (auto& one : detached.ones) {
    one.memory.reset();
    if (!one.stopsByItself) retire.push_back(one.card);
  }
  const auto deadline = Deadline::after(kGrace);
  for (const auto& one : detached.ones) {
    if (!one.stopsByItself) continue;
    while (!one.isGone->load(std::memory_order_acquire) && !deadline.passed())
      std::this_thread::sleep_for(kLook);
    if (!one.isGone->load(std::memory_order_acquire)) retire.push_back(one.card);
  }
  rails_->retireNow(retire);
  if (!detached.ones.empty()) post(nullptr);
  Lock lock(mutex_);
  unfinished_.erase(detached.number);
  changed_.notify_all();
  if (rails_->isPolledHere()) return;  // this thread has to close the cards of other waits
  changed_.wait(mutex_, [&]() REQUIRES(mutex_) {
    return unfinished_.empty() || *unfinished_.begin() > detached.number || isStopped_;
  });
}

CardMemories::Detached CardMemories::detachAll(const KeyHolder* holder, bool staysHolder) {
  Detached detached = begin();
  for (auto& [key, region] : regions_) {
    const auto held = region.holders.find(holder);
    if (held == region.holders.end()) continue;
    const bool hadKeys = std::exchange(held->second.hasKeys, false);
    if (!staysHolder) region.holders.erase(held);
    if (!hadKeys) continue;
    for (size_t card = 0; card < region.cards.size(); ++card) detach(region, card, detached);
  }
  return detached;
}

void CardMemories::takeBack(const KeyHolder* holder) {
  Lock lock(mutex_);
  if (isStopped_) return;
  Detached detached = detachAll(holder, /*staysHolder=*/false);
  lock.unlock();
  finish(std::move(detached));
}

void CardMemories::withdraw(const KeyHolder* holder) {
  Lock lock(mutex_);
  if (isStopped_) return;
  Detached detached = detachAll(holder, /*staysHolder=*/true);
  lock.unlock();
  finish(std::move(detached));
}

void CardMemories::withdrawLater(const KeyHolder* holder, std::function<void()> done) {
  Lock lock(mutex_);
  if (isStopped_) return;
  finishLater(detachAll(holder, /*staysHolder=*/true), std::move(done));
}

void CardMemories::takeBackLater(uint64_t key, size_t card, const KeyHolder* holder,
                                 std::function<void()> done) {
  Lock lock(mutex_);
  if (isStopped_) return;
  Detached detached = begin();
  const auto found = regions_.find(key);
  if (found != regions_.end() && card < found->second.cards.size()) {
    const auto held = found->second.holders.find(holder);
    if (held != found->second.holders.end() && held->second.hasKeys)
      detach(found->second, card, detached);
  }
  finishLater(std::move(detached), std::move(done));
}

// Called under the same lock as begin(), so that tasks stand in the order of their numbers:
// finish() waits for all smaller ones, which must not stand behind it.
void CardMemories::finishLater(Detached detached, std::function<void()> done) {
  enqueue([this, done = std::move(done),
           detached = std::make_shared<Detached>(std::move(detached))]() mutable {
    finish(std::move(*detached));
    done();
  });
}

void CardMemories::onRevoked(uint64_t key) {
  Lock lock(mutex_);
  const auto found = regions_.extract(key);
  if (!found) return;
  Region& region = found.mapped();
  const auto [first, behind] = byAddress_.equal_range(region.memory.data());
  const auto at = std::find_if(first, behind, [&](const auto& one) { return one.second == key; });
  if (at != behind) byAddress_.erase(at);
  bool isTold = false;
  for (const auto& [end, holder] : region.holders) isTold = isTold || holder.hasKeys;
  Detached detached = begin();
  if (isTold) {
    for (size_t card = 0; card < region.cards.size(); ++card) detach(region, card, detached);
  }
  lock.unlock();
  region.cards.clear();
  finish(std::move(detached));
}

// ---- the thread mooncake-reg

void CardMemories::post(std::function<void()> task) {
  Lock lock(mutex_);
  if (!isStopped_) enqueue(std::move(task));
}

void CardMemories::enqueue(std::function<void()> task) {
  tasks_.push_back(task ? std::move(task) : [this] { refresh(); });
  changed_.notify_all();
  if (thread_.joinable()) return;
  const BlockedSignals blocked;
  try {
    thread_ = std::thread([this] { run(); });
    ::pthread_setname_np(thread_.native_handle(), "mooncake-reg");
  } catch (const std::system_error&) {
    // The next task tries again. A peer that waits for a task waits until it is reconnected.
    log(LogLevel::kError, name_, "cannot start a thread that registers memory");
  }
}

void CardMemories::run() {
  Lock lock(mutex_);
  while (!isStopped_) {
    if (tasks_.empty()) {
      changed_.wait(mutex_);
      continue;
    }
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

// Registers all regions with the cards that were opened anew, and tells the holders.
void CardMemories::refresh() {
  Lock lock(mutex_);
  for (uint64_t next = 0; !isStopped_;) {
    const auto found = regions_.lower_bound(next);
    if (found == regions_.end()) return;
    const uint64_t key = found->first;
    next = key + 1;
    for (size_t card = 0; card < rails_->count() && !isStopped_; ++card) {
      const auto region = regions_.find(key);
      if (region == regions_.end()) break;
      if (!isStale(region->second, card)) continue;
      const auto memory = region->second.memory;
      const uint32_t rights = region->second.rights;
      const auto use = table_.open(key, 0, memory.size(), 0);  // keeps the region meanwhile
      if (!use) break;
      lock.unlock();
      auto made = registerWith(card, memory, rights);
      lock.lock();
      const auto again = regions_.find(key);
      if (!made || again == regions_.end() || !isStale(again->second, card)) {
        lock.unlock();
        made.reset();
        lock.lock();
        continue;
      }
      again->second.cards[card] = std::move(made);
      std::vector<std::shared_ptr<KeyHolder>> tell;
      for (const auto& [end, holder] : again->second.holders) {
        if (auto there = holder.end.lock()) tell.push_back(std::move(there));
      }
      lock.unlock();
      for (const auto& holder : tell) holder->onKeysChanged(key);
      tell.clear();
      lock.lock();
    }
  }
}

}  // namespace mooncake
