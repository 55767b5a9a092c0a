#include "proxy/proxy.h"

#include <algorithm>
#include <sched.h>
#include <utility>

#include "base/failpoint.h"
#include "base/thread.h"

namespace mooncake::proxy {

using kernels::ProxyEnd;

namespace {

constexpr uint32_t kMostSlots = 1u << 16;
constexpr size_t kMostByCards = 8;  // threads of a host that has many cards for all its ranks
constexpr uint32_t kMostThreads = 64;
// A thread yields between looks until nothing has happened for so long, and longer while commands
// are under way. Then it sleeps: kernels cannot wake it, so it looks again after a pause, which
// grows with the time that it was idle.
constexpr auto kMostYielding = std::chrono::microseconds(100);
constexpr auto kMostYieldingBusy = std::chrono::milliseconds(2);
constexpr auto kLeastPause = std::chrono::microseconds(50);
constexpr auto kMostPause = std::chrono::milliseconds(1);

Status check(const ProxyOptions& options, size_t regions) {
  const auto wrong = [](const char* name, uint32_t value, uint32_t least, uint32_t most) {
    return Status(ErrorCode::kInvalidArgument, std::string("a proxy has ") + std::to_string(least) +
                                                   " to " + std::to_string(most) + " " + name +
                                                   ", not " + std::to_string(value));
  };
  if (options.ranks < 1 || options.ranks > kMostRanks)
    return wrong("ranks", options.ranks, 1, kMostRanks);
  if (options.rank >= options.ranks)
    return wrong("as its own rank", options.rank, 0, options.ranks - 1);
  if (options.slots < 1 || options.slots > kMostSlots)
    return wrong("slots", options.slots, 1, kMostSlots);
  if (options.slots & (options.slots - 1))
    return {ErrorCode::kInvalidArgument,
            "the slots of a proxy's ring are a power of two, not " + std::to_string(options.slots)};
  if (options.signalWords < 1 || options.signalWords > kMostSignalWords)
    return wrong("signal words", options.signalWords, 1, kMostSignalWords);
  if (options.threads < 1 || options.threads > kMostThreads)
    return wrong("threads", options.threads, 1, kMostThreads);
  if (regions > kMostRegions) return wrong("regions", uint32_t(regions), 0, kMostRegions);
  return {};
}

}  // namespace

uint32_t threadsFor(const Engine& engine, uint32_t peers) {
  const size_t setting = engine.env().proxyThreads;
  const size_t wanted = setting != 0 ? setting : std::min(engine.cardCount(), kMostByCards);
  return uint32_t(std::clamp<size_t>(wanted, 1, std::clamp<size_t>(peers, 1, kMostThreads)));
}

Result<std::unique_ptr<Proxy>> Proxy::create(std::shared_ptr<Engine> engine,
                                             std::vector<LocalRegion> regions,
                                             ProxyOptions options) {
  MOONCAKE_TRY(check(options, regions.size()));
  std::unique_ptr<Proxy> made(new Proxy(std::move(engine), std::move(regions), options));
  auto memory = ProxyMemory::create(options.accelerator, options.ranks, options.slots,
                                    options.signalWords, options.tickets, options.counts);
  if (!memory.ok()) return memory.error();
  made->memory_ = std::move(*memory);
  if (const Status& mapped = made->memory_->countsMapped(); !mapped.ok() && !options.counts.empty())
    log(LogLevel::kInfo, made->engine_->logName(),
        "rank " + std::to_string(options.rank) +
            ", proxy: kernels look for its answers in memory of the host, because the host cannot "
            "write the device's: " +
            mapped.error().message);
  MOONCAKE_TRY(made->registerRegions());
  made->bells_ = std::make_shared<std::deque<Doorbell>>(options.threads);
  made->flushed_ = std::make_unique<std::atomic<uint32_t>[]>(options.threads);
  made->engine_->retire({}, [bells = made->bells_] { return false; });
  return made;
}

Status Proxy::registerRegions() {
  const auto signals = memory_->signals();
  auto region = engine_->regions().add(signals.data(), signals.size(), kRemoteRead | kRemoteWrite);
  if (!region.ok()) return region.status();
  signals_ = std::move(*region);
  for (const LocalRegion& source : sources_) {
    auto target = engine_->regions().add(source.memory.data(), source.memory.size(),
                                         kRemoteWrite | kLasting, source.owner);
    if (!target.ok()) return target.status();
    targets_.push_back(std::move(*target));
  }
  return {};
}

Bytes Proxy::describe() const {
  Regions ours{.ranks = options_.ranks,
               .signalWords = options_.signalWords,
               .signals = signals_.remote(),
               .regions = {}};
  for (size_t i = 0; i < targets_.size(); ++i)
    ours.regions.push_back({targets_[i].remote(), bool(sources_[i].owner)});
  return ours.encode();
}

Status Proxy::attach(const std::vector<std::shared_ptr<Peer>>& peers,
                     const std::vector<Bytes>& descriptions) {
  const std::string who = "rank " + std::to_string(options_.rank);
  if (peers.size() != options_.ranks || descriptions.size() != options_.ranks) {
    return {ErrorCode::kInvalidArgument, who + ", proxy: attach() needs a peer and a description " +
                                             "for each of the " + std::to_string(options_.ranks) +
                                             " ranks"};
  }
  std::vector<Ring> rings(options_.ranks);
  uint32_t count = 0;
  for (uint32_t rank = 0; rank < options_.ranks; ++rank) {
    // A kernel reaches its own rank's memory, and memory of ranks without a ring, without the
    // engine.
    if (rank == options_.rank || descriptions[rank].empty()) {
      memory_->ringOf(rank).end(ProxyEnd::kFailed);
      continue;
    }
    const std::string name = "rank " + std::to_string(rank);
    auto targets = Regions::decode(descriptions[rank], name);
    if (!targets.ok()) return targets.status();
    if (!peers[rank] || targets->ranks != options_.ranks ||
        targets->signalWords != options_.signalWords) {
      return {ErrorCode::kMismatch, who + ", proxy: " + name +
                                        " is not connected, or has other numbers of ranks or " +
                                        "signal words: use the same options on all ranks"};
    }
    rings[rank].thread = count++ % options_.threads;
    rings[rank].commands = std::make_unique<PeerCommands>(
        options_.rank, rank, peers[rank], memory_->ringOf(rank), sources_, std::move(*targets),
        PeerLimits{.timeout = options_.timeout}, &(*bells_)[rings[rank].thread]);
  }
  rings_ = std::move(rings);
  for (uint32_t i = 0; i < std::min(options_.threads, count); ++i) {
    auto thread = startThread("mooncake-proxy", [this, i] { run(i); });
    if (!thread.ok()) return thread.status();
    threads_.push_back(std::move(*thread));
  }
  return {};
}

kernels::ProxyView Proxy::view() const {
  kernels::ProxyView view = memory_->view();
  view.timeoutNs = uint64_t(std::chrono::nanoseconds(options_.kernelTimeout).count());
  return view;
}

Status Proxy::statusOf(uint32_t rank) const {
  if (rank >= rings_.size() || !rings_[rank].commands) {
    return {ErrorCode::kInvalidArgument,
            "rank " + std::to_string(options_.rank) + ", proxy: there is no ring to rank " +
                std::to_string(rank) + ": kernels reach its memory without the engine"};
  }
  return rings_[rank].commands->status();
}

void Proxy::wake() {
  for (Doorbell& bell : *bells_) bell.ringSleepers();
}

Status Proxy::flush(Deadline deadline) {
  const uint32_t number = ++flushes_;
  for (uint32_t i = 0; i < threads_.size(); ++i) {
    while (flushed_[i].load(std::memory_order_acquire) != number) {
      if (deadline.passed()) {
        return {ErrorCode::kTimeout, "rank " + std::to_string(options_.rank) +
                                         ", proxy: not all commands have completed in time"};
      }
      wake();
      std::this_thread::sleep_for(kLeastPause);
    }
  }
  return {};
}

Status Proxy::end(uint32_t rank, Deadline deadline) {
  if (rank >= rings_.size() || !rings_[rank].commands) return {};
  PeerCommands& commands = *rings_[rank].commands;
  commands.drop();
  failpoint("proxy-end");
  while (commands.status().ok()) {
    if (deadline.passed()) {
      return {ErrorCode::kTimeout, "rank " + std::to_string(options_.rank) +
                                       ", proxy: the commands to rank " + std::to_string(rank) +
                                       " could not be ended in time. Is this process stopped?"};
    }
    wake();
    std::this_thread::sleep_for(kLeastPause);
  }
  return {};
}

void Proxy::close() {
  stopping_.bump();
  if (bells_) wake();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  for (const Ring& ring : rings_) {
    if (!ring.commands) continue;
    ring.commands->end(ProxyEnd::kClosed,
                       {ErrorCode::kAborted, "rank " + std::to_string(options_.rank) +
                                                 ", proxy: it is closed: no command goes on"});
  }
  targets_.clear();
  signals_ = MemoryRegion();
}

void Proxy::run(uint32_t thread) {
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < options_.ranks; ++rank)
    if (rings_[rank].commands && rings_[rank].thread == thread) ranks.push_back(rank);
  auto changed = Clock::now();
  while (stopping_.generation() == 0) {
    const auto now = Clock::now();
    const uint32_t flush = flushes_.load(std::memory_order_acquire);
    bool hasChanged = false, isBusy = false;
    for (const uint32_t rank : ranks) {
      PeerCommands& commands = *rings_[rank].commands;
      const bool hasDone = commands.drive(now);
      isBusy |= commands.isBusy();
      if (!hasDone) continue;
      hasChanged = true;
      if (commands.isEnded()) tellEnd(rank);
    }
    if (!hasChanged && !isBusy) flushed_[thread].store(flush, std::memory_order_release);
    if (hasChanged) {
      changed = now;
    } else if (now - changed < (isBusy ? kMostYieldingBusy : kMostYielding)) {
      ::sched_yield();
    } else {
      const auto pause = std::clamp<Clock::duration>((now - changed) / 4, kLeastPause, kMostPause);
      const Waiter waiter{(*bells_)[thread], stopping_, 0, Deadline::after(pause),
                          SpinPolicy{.pauses = 0, .yields = 0}};
      (void)waiter.until([&] {
        return std::ranges::any_of(ranks,
                                   [&](uint32_t rank) { return rings_[rank].commands->hasNews(); });
      });
    }
  }
}

void Proxy::tellEnd(uint32_t rank) const {
  const PeerCommands& commands = *rings_[rank].commands;
  log(commands.hasLeft() ? LogLevel::kInfo : options_.endLevel, engine_->logName(),
      commands.status().error().message);
}

}  // namespace mooncake::proxy
