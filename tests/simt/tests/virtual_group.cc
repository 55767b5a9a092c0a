#include "virtual_group.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <span>
#include <utility>

#include "tests/simt/sanitizers.h"

namespace mooncake::kernels {
namespace {
constexpr int kCalls = 0, kReplays = 1, kProxy = 2;  // streams
constexpr int kMostAgreements = 64;
}  // namespace

VirtualGroup::VirtualGroup(simt::World& world, const GroupShape& shape)
    : world_(world), shape_(shape) {
  for (int rank = 0; rank < shape.ranks; ++rank) {
    memory_.push_back(std::make_unique<Memory>());
    const size_t mails = shape.hostOf.empty() ? 0 : 64 + size_t(shape.ranks) * sizeof(Mails);
    memory_.back()->data.assign(shape.banks * shape.bankBytes + mails, 0xee);
  }
  for (int rank = 0; rank < shape.ranks; ++rank) {
    Memory& own = *memory_[size_t(rank)];
    own.state.rank = rank;
    own.state.ranks = shape.ranks;
    own.state.active = (uint64_t(1) << shape.ranks) - 1;
    own.state.patienceNs = shape.patienceNs;
    own.state.decisionNs = shape.decisionNs;
    own.state.banks = shape.banks;
    own.state.bankBytes = shape.bankBytes;
    own.state.host = &own.host;
    own.state.done = own.host.done = shape.ended;
    own.state.serial = shape.ended;
    for (uint64_t& word : own.signals.words[0]) word = shape.ended << kCallBits;
    for (int peer = 0; peer < shape.ranks; ++peer) {
      if (areRemote(rank, peer)) continue;
      own.state.data[peer] = memory_[size_t(peer)]->data.data();
      own.state.signals[peer] = &memory_[size_t(peer)]->signals;
    }
    world.own(rank, own.data.data(), own.data.size());
    world.own(rank, &own.signals, sizeof(own.signals));
    world.own(rank, &own.host, sizeof(own.host), simt::MemoryOwner::kHost);
  }
  if (!shape.hostOf.empty()) makeRemote();
}

// As PeerArea does.
void VirtualGroup::makeRemote() {
  const auto ranks = size_t(shape_.ranks);
  const size_t outgoingAt = (shape_.banks * shape_.bankBytes + 63) / 64 * 64;
  const size_t bankBytes = shape_.inboxBankBytes ? shape_.inboxBankBytes : shape_.bankBytes;
  const size_t inboxBytes = (sizeof(Mails) + shape_.banks * bankBytes + 127) / 128 * 128;
  for (const auto& memory : memory_) memory->inbox.assign(ranks * inboxBytes, 0xee);
  for (int rank = 0; rank < shape_.ranks; ++rank) {
    Memory& own = *memory_[size_t(rank)];
    own.proxy = std::make_unique<VirtualProxy>(world_, rank, shape_.ranks, shape_.seed);
    world_.own(rank, own.inbox.data(), own.inbox.size());
    std::vector<size_t> mails;
    Remote& remote = own.state.remote;
    remote.proxy = own.proxy->view();
    remote.inboxBankBytes = bankBytes;
    remote.outgoingAt = outgoingAt;
    remote.outgoing = reinterpret_cast<Mails*>(own.data.data() + outgoingAt);
    std::fill_n(remote.outgoing, ranks, Mails{});
    for (size_t peer = 0; peer < ranks; ++peer) {
      mails.push_back(peer * inboxBytes);
      std::fill_n(own.inbox.data() + mails.back(), sizeof(Mails), 0);
      for (size_t mate = 0; mate < ranks; ++mate)
        if (!areRemote(int(peer), int(mate))) remote.hosts[peer] |= uint64_t(1) << mate;
      if (!areRemote(rank, int(peer))) {
        remote.regions[peer] = memory_[peer]->inbox.data();
        continue;
      }
      remote.ranks |= uint64_t(1) << peer;
      remote.inboxes[peer] = own.inbox.data() + mails.back();
      remote.inboxAt[peer] = size_t(rank) * inboxBytes;
    }
    own.proxy->setRegions(own.data, own.inbox, std::move(mails));
  }
}

void VirtualGroup::checkPushes() const {
  for (int rank = 0; rank < shape_.ranks; ++rank) {
    const Remote& remote = state(rank).remote;
    for (int peer = 0; peer < shape_.ranks; ++peer) {
      if (isLost(rank) || isKilled(rank) || !has(remote.ranks, peer)) continue;
      uint64_t last = ~uint64_t(0);  // serial number of the exchange
      for (const Agreement& made : agreements_)
        if (!has(made.active, peer)) last = std::min(last, made.serial);
      const auto* const mails = reinterpret_cast<const Mail*>(remote.outgoing + peer);
      for (const Mail& mail : std::span(mails, sizeof(Mails) / sizeof(Mail)))
        ASSERT_LE(mail.signal >> kCallBits, last) << "rank " << rank << " to rank " << peer;
    }
  }
}

int VirtualGroup::stream() const { return isBeside() ? kReplays : kCalls; }

Exchange VirtualGroup::complete(int rank, Exchange exchange) {
  Memory& own = *memory_[size_t(rank)];
  exchange.state = &own.state;
  exchange.decisionNs = shape_.decisionNs;
  ++own.called;
  exchange.isOfGraph = calls(own.called) == calls(own.called - 1);
  exchange.isHeld = isBeside();
  exchange.skipNs = shape_.skipNs;
  return exchange;
}

void VirtualGroup::launch(int rank, const std::string& name, size_t sharedBytes,
                          const Exchange& exchange, Kernel kernel) {
  world_.launch(rank, stream(), name, {shape_.blocks}, {shape_.threads}, sharedBytes,
                [kernel = std::move(kernel), exchange] { kernel(exchange); });
}

void VirtualGroup::call(int rank, const std::string& name, Exchange exchange, Kernel kernel) {
  launch(rank, name, 0, complete(rank, exchange), std::move(kernel));
}

void VirtualGroup::callInTwo(int rank, const std::string& name, Exchange exchange,
                             size_t sharedBytes, Kernel send, Kernel receive) {
  const Exchange completed = complete(rank, exchange);
  launch(rank, name + " send", sharedBytes, completed, std::move(send));
  launch(rank, name + " receive", 0, completed, std::move(receive));
}

void VirtualGroup::run(int rank, const std::string& name, std::function<void()> body) {
  world_.launch(rank, stream(), name, {}, {}, 0, std::move(body));
}

void VirtualGroup::kill(int rank, uint64_t afterAtomics) {
  world_.kill(rank, afterAtomics);
  killed_ |= uint64_t(1) << rank;
}

void VirtualGroup::start() {
  std::vector<VirtualProxy*> proxies;
  for (const auto& memory : memory_) proxies.push_back(memory->proxy.get());
  for (int rank = 0; rank < shape_.ranks && !shape_.hostOf.empty(); ++rank) {
    world_.launch(rank, kProxy, "proxy", {}, {}, 0, [this, rank, proxies] {
      memory_[size_t(rank)]->proxy->run(proxies, [this] { return isOver(); });
    });
  }
  for (int rank = 0; rank < shape_.ranks; ++rank) {
    launchStops(rank);
    if (shape_.hosts != Hosts::kNone) world_.host(rank, "host", [this, rank] { runHost(rank); });
  }
}

// Whether the kernels of all living ranks have ended.
bool VirtualGroup::isOver() const {
  for (int rank = 0; rank < shape_.ranks; ++rank) {
    if (!world_.isKilled(rank) &&
        !__atomic_load_n(&memory_[size_t(rank)]->isOver, __ATOMIC_ACQUIRE))
      return false;
  }
  return true;
}

// Calls: the host's stop comes after them. On a stream of its own, it comes at any time.
void VirtualGroup::launchStops(int rank) {
  Memory* const own = memory_[size_t(rank)].get();
  if (!isBeside()) {
    world_.launch(rank, kCalls, "acknowledge", {}, {}, 0, [own] {
      acknowledge(own->state);
      storeReleaseSystem(&own->isOver, 1);
    });
    return;
  }
  world_.launch(rank, kReplays, "end", {}, {}, 0, [own] { storeReleaseSystem(&own->isOver, 1); });
  const auto most = uint32_t(shape_.skipNs ? kMostAgreements : shape_.ranks);
  for (uint32_t generation = 1; generation < most; ++generation) {
    world_.launch(rank, kCalls, "acknowledge", {}, {}, 0, [own, generation] {
      while (loadRelaxedSystem(&own->enqueued) < generation) {
        if (loadAcquireSystem(&own->isHostOver)) return;
        relax();
      }
      acknowledge(own->state);
    });
  }
}

void VirtualGroup::evict(int rank, unsigned afterLooks) {
  evictedLater_ = rank;
  looksLeft_ = afterLooks;
}

void VirtualGroup::loseAfterSkip(uint64_t seed) {
  losses_.emplace(seed);
  for (int rank = 0; rank < shape_.ranks; ++rank) world_.mayStop(rank);
}

void VirtualGroup::loseSome(const Agreement& agreement) {
  if (!losses_ || !agreement.verdicts[0].skips || agreement.among == agreement.active) return;
  const auto draw = [&](unsigned below) { return unsigned((*losses_)() % below); };
  const bool areAll = draw(4) == 0;
  unsigned left = areAll ? 0 : draw(unsigned(countOf(agreement.among)));
  for (int rank = 0; rank < shape_.ranks; ++rank) {
    if (!has(agreement.among, rank) || (!areAll && left-- != 0)) continue;
    const uint64_t stops = 1 + draw(60 * unsigned(shape_.ranks));
    world_.stop(rank, stops, 1'000'000 * (1 + draw(40)));
    kill(rank, stops + 1 + draw(40));
  }
  losses_.reset();
}

// All hosts share one thread.
void VirtualGroup::look() {
  const simt::sanitizers::Ignored ignored;
  if (evictedLater_ < 0 || looksLeft_-- > 0) return;
  evict(evictedLater_);
  evictedLater_ = -1;
}

bool VirtualGroup::isLost(int rank) const { return world_.isKilled(rank) || isEvicted(rank); }

// Hosts tell each other their decisions, so the work of the host that decided comes before.
const VirtualGroup::Agreement* VirtualGroup::agreed(uint32_t generation) const {
  const Agreement* made = nullptr;
  {
    const simt::sanitizers::Ignored ignored;
    if (agreements_.size() >= generation) made = &agreements_[generation - 1];
  }
  if (made) simt::sanitizers::acquire(&agreements_);
  return made;
}

// Returns null until all living ranks have stopped. All hosts share one thread, so the first one
// that finds this decides for all. A rank that is killed later is lost in the next generation.
const VirtualGroup::Agreement* VirtualGroup::agree(uint32_t generation) {
  Agreement agreement{};
  std::vector<bool> areOver(size_t(shape_.ranks));
  for (int rank = 0; rank < shape_.ranks; ++rank) {
    if (isLost(rank)) continue;
    const Memory& theirs = *memory_[size_t(rank)];
    // Nothing is left to stop. The host's stop itself may still be under way beside the kernels.
    const bool isOver = loadAcquireSystem(isBeside() ? &theirs.isHostOver : &theirs.isOver);
    if (!isOver && loadAcquireSystem(&theirs.host.stopped) < generation) return agreed(generation);
    areOver[size_t(rank)] = isOver;
  }
  // If another host has decided, kernels may have stopped again, and write their words.
  if (const Agreement* const made = agreed(generation)) return made;
  // From here on no other thread runs before the decision.
  std::vector<PeerReport> reports(size_t(shape_.ranks));
  for (int rank = 0; rank < shape_.ranks; ++rank) {
    if (isLost(rank)) continue;
    agreement.active |= uint64_t(1) << rank;
    const Memory& theirs = *memory_[size_t(rank)];
    const HostWords& host = theirs.host;
    const bool isOver = areOver[size_t(rank)];
    simt::sanitizers::acquire(&theirs.late);
    reports[size_t(rank)] = {.done = host.done,
                             .stoppedAt = isOver ? host.done : host.stoppedAt,
                             .ended = isOver ? theirs.state.serial : host.ended,
                             .taken = isOver ? theirs.state.serial : host.taken,
                             .hadAll = host.hadAll,
                             .skipped = theirs.skipped,
                             .late = !isOver && theirs.late == host.stoppedAt ? theirs.late : 0};
  }
  for (int rank = 0; rank < shape_.ranks; ++rank)
    agreement.verdicts.push_back(verdictFor(rank, agreement.active, reports, shape_.banks));
  agreement.lastOld = agreement.verdicts[0].partial - 1;
  agreement.among = agreement.verdicts[0].among;
  for (int rank = 0; rank < shape_.ranks; ++rank) {
    const PeerVerdict& verdict = agreement.verdicts[size_t(rank)];
    if (!has(agreement.active, rank)) continue;
    agreement.serial = verdict.serial;
    // Operations for which the rank is ahead or behind take one exchange each.
    if (verdict.decision == Decision::kGoOn)
      agreement.serial -= reports[size_t(rank)].done - agreement.lastOld;
  }
  {
    const simt::sanitizers::Ignored ignored;
    loseSome(agreement);
    if (agreements_.size() < generation) agreements_.push_back(std::move(agreement));
  }
  simt::sanitizers::release(&agreements_);
  return agreed(generation);
}

// Number of the operation in which the rank's kernel has waited long enough to skip others; 0: none.
uint64_t VirtualGroup::lateOperation(int rank) {
  Memory& own = *memory_[size_t(rank)];
  const uint64_t number = loadAcquireSystem(&own.host.waits);
  if (number != own.waits) own.since = now();
  own.waits = number;
  const bool isLate = shape_.skipNs && number != own.settled &&
                      number > loadRelaxedSystem(&own.host.done) &&
                      now() - own.since > shape_.skipNs;
  return isLate ? number : 0;
}

void VirtualGroup::runHost(int rank) {
  shape_.hosts == Hosts::kRefuseAnyTime ? refuseSometime(rank) : decideUntilOver(rank);
  storeReleaseSystem(&memory_[size_t(rank)]->isHostOver, 1);
}

void VirtualGroup::decideUntilOver(int rank) {
  Memory& own = *memory_[size_t(rank)];
  HostWords& host = own.host;
  uint64_t active = (uint64_t(1) << shape_.ranks) - 1;
  EmulatedDecisions decisions(host);
  const auto hasLost = [&] {
    for (int peer = 0; peer < shape_.ranks; ++peer)
      if (has(active, peer) && isLost(peer)) return true;
    return false;
  };
  while (!loadAcquireSystem(&own.isOver)) {
    look();
    if (isEvicted(rank)) return;
    own.late = lateOperation(rank);
    if (own.late) {
      const simt::sanitizers::Ignored ignored;
      wanted_ = decisions.generation() + 1;
    }
    const bool isWanted = [&] {
      const simt::sanitizers::Ignored ignored;
      return wanted_ == decisions.generation() + 1;
    }();
    if (!hasLost() && !isWanted) {
      relax();
      continue;
    }
    simt::sanitizers::release(&own.late);
    decisions.stop();
    storeReleaseSystem(&own.enqueued, decisions.generation());
    while (!decisions.haveStopped()) {
      if (!isBeside() && loadAcquireSystem(&own.isOver)) return;
      if (isEvicted(rank)) return;
      relax();
    }
    missing_[size_t(rank)] |= host.missing;
    const Agreement* agreement = nullptr;
    while (!isEvicted(rank) && !(agreement = agree(decisions.generation()))) relax();
    if (isEvicted(rank)) return;
    for (const uint64_t since = now(); now() < since + own.decisionDelayNs;) relax();
    const PeerVerdict& verdict = agreement->verdicts[size_t(rank)];
    const uint64_t lost = ((uint64_t(1) << shape_.ranks) - 1) & ~agreement->active;
    while (!shape_.hostOf.empty() && !loadAcquireSystem(&own.isOver) && !own.proxy->end(lost))
      relax();
    active = verdict.active;
    own.skipped = verdict.skipped;
    own.since = now();
    if (verdict.skips) own.settled = verdict.partial;
    const bool refuses = shape_.hosts == Hosts::kRefuse;
    {
      const simt::sanitizers::Ignored ignored;
      ++decided_[size_t(refuses ? Decision::kRefuse : verdict.decision)];
    }
    if (!refuses) decisions.decide(verdict);
    if (shape_.hosts != Hosts::kDecide) return decisions.refuse();
  }
}

// As PeerGuard does, which stops kernels for an agreement first, or refuses without that.
void VirtualGroup::refuseSometime(int rank) {
  Memory& own = *memory_[size_t(rank)];
  std::mt19937_64 random(shape_.seed * kMaxRanks + uint64_t(rank));
  const auto pass = [&](uint64_t ns) {
    for (const uint64_t since = now(); now() < since + ns;) relax();
  };
  EmulatedDecisions decisions(own.host);
  pass(random() % 8'000'000);
  if (random() % 2) {
    decisions.stop();
    if (random() % 2) pass(random() % 2'000'000);
    if (random() % 2) storeReleaseSystem(&own.enqueued, decisions.generation());
    if (random() % 2) pass(random() % 4'000'000);
  }
  decisions.refuse();
}

uint64_t VirtualGroup::calls(uint64_t number) const {
  if (!shape_.ofGraphs) return number;
  return shape_.callsEach ? number / shape_.callsEach : 0;
}

void VirtualGroup::checkChanges() const {
  for (int rank = 0; rank < shape_.ranks; ++rank) {
    if (isKilled(rank)) continue;
    const HostWords& host = memory_[size_t(rank)]->host;
    ASSERT_EQ(host.calls, calls(host.done - shape_.ended)) << "rank " << rank;
    for (uint32_t i = 0; i < host.changeCount; ++i) {
      const Change& change = host.changes[i];
      ASSERT_EQ(change.lastCall, calls(change.lastOld - shape_.ended)) << "rank " << rank;
    }
  }
}

uint64_t VirtualGroup::contributors(uint64_t number) const {
  uint64_t active = (uint64_t(1) << shape_.ranks) - 1;
  for (const Agreement& agreement : agreements_) {
    if (number > agreement.lastOld) active = agreement.active;
    if (number == agreement.lastOld + 1) active = agreement.among;
  }
  return active;
}

uint64_t VirtualGroup::members(uint64_t number) const {
  uint64_t active = (uint64_t(1) << shape_.ranks) - 1;
  for (const Agreement& agreement : agreements_)
    if (number > agreement.lastOld) active = agreement.active;
  return active;
}

unsigned VirtualGroup::skipped() const {
  unsigned count = 0;
  for (const Agreement& agreement : agreements_) {
    const uint64_t number = agreement.lastOld + 1;
    if (contributors(number) != agreement.among) continue;  // it was lost, or skipped again
    count += unsigned(countOf(agreement.active & ~agreement.among));
  }
  return count;
}

uint64_t VirtualGroup::told(int rank, uint64_t number) const {
  uint64_t active = (uint64_t(1) << shape_.ranks) - 1;
  const HostWords& host = memory_[size_t(rank)]->host;
  for (uint32_t i = 0; i < host.changeCount; ++i)
    if (number > host.changes[i].lastOld) active = host.changes[i].active;
  return active;
}

}  // namespace mooncake::kernels
