#include "peers/peer_area.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <span>
#include <string>
#include <utility>

#include "collectives/collectives.h"
#include "device/device_env.h"
#include "device/peer_memory.h"
#include "peers/gather_blocks.h"

namespace mooncake {
namespace {

using kernels::GroupState;
using kernels::HostWords;
using kernels::Mails;
using kernels::ProxyCounts;
using kernels::ProxyTickets;
using kernels::Signals;

// A rank computes places in other ranks' memory by its own sizes.
Status agreeOnSizes(Group& group, const PeerArea::Settings& settings, Deadline deadline) {
  // The largest and, as their complements, the smallest of all ranks.
  uint64_t sizes[] = {settings.bankBytes, ~uint64_t(settings.bankBytes), settings.inboxBankBytes,
                      ~uint64_t(settings.inboxBankBytes)};
  MOONCAKE_TRY(allreduce(group, std::as_writable_bytes(std::span(sizes)),
                         {DType::kUInt64, ReduceKind::kMax}, deadline));
  if (sizes[0] == ~sizes[1] && sizes[2] == ~sizes[3]) return {};
  return {ErrorCode::kMismatch, "the ranks' memory for kernels has " + std::to_string(~sizes[1]) +
                                    " to " + std::to_string(sizes[0]) +
                                    " bytes: its size must be the same on all ranks "
                                    "(MOONCAKE_PEER_BYTES, or the bytes of the Buffer)"};
}

constexpr size_t kAlignment = 256;
size_t alignedUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
static_assert(sizeof(Mails) % kAlignment == 0);

constexpr size_t kPinnedBytes = std::max({sizeof(HostWords), sizeof(GroupState), sizeof(Signals)});

}  // namespace

size_t PeerArea::bankStride() const { return alignedUp(settings_.bankBytes); }
size_t PeerArea::signalsOffset() const { return outgoingOffset() + parts_.size() * sizeof(Mails); }
size_t PeerArea::stateOffset() const { return signalsOffset() + alignedUp(sizeof(Signals)); }
size_t PeerArea::ticketsOffset() const { return stateOffset() + alignedUp(sizeof(GroupState)); }
size_t PeerArea::countsOffset() const {
  return ticketsOffset() + parts_.size() * sizeof(ProxyTickets);
}
size_t PeerArea::inboxBankStride() const { return alignedUp(settings_.inboxBankBytes); }
size_t PeerArea::inboxBytes() const { return sizeof(Mails) + settings_.banks * inboxBankStride(); }

uint64_t PeerArea::remoteOf(int rank) const { return present_ & ~hosts_[size_t(rank)]; }

uint64_t PeerArea::inboxAt(int rank, int from) const {
  const uint64_t before = (uint64_t(1) << from) - 1;
  return uint64_t(std::popcount(remoteOf(rank) & before)) * inboxBytes();
}

Result<std::unique_ptr<PeerArea>> PeerArea::make(Group& group, Accelerator& accelerator,
                                                 DeviceStream stream, const Settings& settings,
                                                 Deadline deadline) {
  std::unique_ptr<PeerArea> area(new PeerArea(accelerator, stream, settings));
  MOONCAKE_TRY(agreeOnSizes(group, settings, deadline));
  const auto own = area->allocate(group);
  MOONCAKE_TRY(agreeOnAll(group, own.ok() ? Status() : Status(own.error()), deadline));
  auto shared = exchangeAllocations(group, *own, deadline);
  if (!shared.ok()) return shared.error();
  area->hosts_ = std::move(shared->hosts);
  if (settings.inboxBankBytes == 0) MOONCAKE_TRY(requireOneHost(group, area->hosts_));
  Status mine = area->mapAll(shared->allocations, area->parts_);
  if (mine.ok()) mine = area->clearMails();
  MOONCAKE_TRY(agreeOnAll(group, mine, deadline));
  // As long as all are on one host, none has a proxy.
  if (!requireOneHost(group, area->hosts_).ok()) {
    MOONCAKE_TRY(area->shareInboxes(group, deadline));
    MOONCAKE_TRY(area->meetRemote(group, deadline));
  }
  MOONCAKE_TRY(agreeOnAll(group, area->initialize(), deadline));
  return area;
}

Result<SharedAllocation> PeerArea::allocate(const Group& group) {
  const auto ranks = size_t(group.size());
  if (ranks > size_t(kernels::kMaxRanks)) {
    return Error{ErrorCode::kUnsupported, "kernels take at most " +
                                              std::to_string(kernels::kMaxRanks) +
                                              " ranks, and the group has " + std::to_string(ranks)};
  }
  PeerMemory* const memory = accelerator_.peerMemory();
  if (!memory)
    return Error{ErrorCode::kUnsupported, std::string(accelerator_.name()) + " has no devices"};
  MOONCAKE_TRY(memory->checkSharing(stream_.device));
  MOONCAKE_TRY(accelerator_.prepareKernels(stream_.device));
  const auto env = DeviceEnv::read();
  if (!env.ok()) return env.error();
  const auto pinned = accelerator_.allocatePinned(alignedUp(kPinnedBytes));
  if (!pinned.ok()) return pinned.error();
  pinned_ = *pinned;
  mappings_.emplace(*memory, PeerMappings::Settings{.device = stream_.device,
                                                    .owner = uint64_t(group.rank()),
                                                    .limit = env->peerMemory});
  rank_ = group.rank();
  present_ = bitsOf(group.lastView->active);
  parts_.resize(ranks);
  inboxes_.resize(ranks);
  const size_t bytes = countsOffset() + ranks * sizeof(ProxyCounts);
  const auto own = mappings_->allocate(bytes, group.lastView->epoch);
  if (!own.ok()) return own.error();
  parts_[size_t(rank_)] = own->memory;
  auto descriptor = mappings_->descriptorOf(own->allocation);
  if (!descriptor.ok()) return descriptor.error();
  return SharedAllocation{own->allocation, std::move(*descriptor)};
}

// Maps the memory of the other ranks of this host. Each has as much as this one.
Status PeerArea::mapAll(std::vector<SharedAllocation>& allocations, Memory& memory) {
  for (size_t peer = 0; peer < allocations.size(); ++peer) {
    if (int(peer) == rank_ || !(hosts_[size_t(rank_)] >> peer & 1)) continue;
    SharedAllocation& theirs = allocations[peer];
    if (theirs.allocation.bytes < memory[size_t(rank_)].size())
      return {ErrorCode::kMismatch, theirs.allocation.text() + " is smaller than the other ranks'"};
    const auto mapped = mappings_->open(
        theirs.allocation, [&]() -> Result<Fd> { return std::move(theirs.descriptor); });
    if (!mapped.ok()) return mapped.error();
    memory[peer] = mapped->memory;
  }
  return {};
}

// Clears the signals, and the memory that a proxy uses.
Status PeerArea::clearMails() {
  std::memset(pinned_.data(), 0, pinned_.size());
  const auto own = parts_[size_t(rank_)];
  MOONCAKE_TRY(clear(own.subspan(outgoingOffset(), stateOffset() - outgoingOffset())));
  return clear(
      own.subspan(ticketsOffset(), parts_.size() * (sizeof(ProxyTickets) + sizeof(ProxyCounts))));
}

// Allocates the inboxes of the ranks on other hosts, and maps the inboxes of this host's ranks.
Status PeerArea::shareInboxes(Group& group, Deadline deadline) {
  const auto own = allocateInboxes(group);
  MOONCAKE_TRY(agreeOnAll(group, own.ok() ? Status() : Status(own.error()), deadline));
  auto shared = exchangeAllocations(group, *own, deadline);
  if (!shared.ok()) return shared.error();
  if (shared->hosts != hosts_)
    return {ErrorCode::kUnsupported, "the ranks that unix sockets reach have changed"};
  return agreeOnAll(group, mapAll(shared->allocations, inboxes_), deadline);
}

Result<SharedAllocation> PeerArea::allocateInboxes(const Group& group) {
  const auto inboxes = size_t(std::popcount(remoteOf(rank_)));
  const auto made = mappings_->allocate(inboxes * inboxBytes(), group.lastView->epoch);
  if (!made.ok()) return made.error();
  inboxes_[size_t(rank_)] = made->memory;
  for (size_t i = 0; i < inboxes; ++i)
    MOONCAKE_TRY(clear(made->memory.subspan(i * inboxBytes(), sizeof(Mails))));
  auto descriptor = mappings_->descriptorOf(made->allocation);
  if (!descriptor.ok()) return descriptor.error();
  return SharedAllocation{made->allocation, std::move(*descriptor)};
}

// Clears memory of the device by way of pinned memory, which is all zeros.
Status PeerArea::clear(std::span<std::byte> memory) {
  while (!memory.empty()) {
    const size_t bytes = std::min(memory.size(), pinned_.size());
    MOONCAKE_TRY(accelerator_.copy(stream_, memory.data(), pinned_.data(), bytes));
    memory = memory.subspan(bytes);
  }
  return accelerator_.synchronize(stream_);
}

Status PeerArea::meetRemote(Group& group, Deadline deadline) {
  const auto own = parts_[size_t(rank_)];
  std::vector<uint64_t> inboxes;
  for (int peer = 0; peer < int(parts_.size()); ++peer) inboxes.push_back(inboxAt(peer, rank_));
  auto made = PeerProxy::make(
      group,
      {.owner = {&accelerator_, stream_.device},
       .own = own.first(signalsOffset()),
       .inboxes = inboxes_[size_t(rank_)],
       .tickets = own.subspan(ticketsOffset(), parts_.size() * sizeof(ProxyTickets)),
       .counts = own.subspan(countsOffset(), parts_.size() * sizeof(ProxyCounts)),
       .remote = remoteOf(rank_),
       .inboxAt = std::move(inboxes),
       .inboxBytes = inboxBytes(),
       .timeout = settings_.decision},
      own.subspan(outgoingOffset(), sizeof(Mails)), deadline);
  if (!made.ok()) return made.error();
  proxy_ = std::move(*made);
  return {};
}

// Fills in the device's memory, by way of pinned memory.
Status PeerArea::initialize() {
  std::byte* const own = parts_[size_t(rank_)].data();
  GroupState state;
  state.rank = rank_;
  state.ranks = int(parts_.size());
  state.active = present_;
  state.patienceNs = uint64_t(settings_.patience.count());
  state.decisionNs = uint64_t(settings_.decision.count());
  state.banks = settings_.banks;
  state.bankBytes = bankStride();
  for (size_t peer = 0; peer < parts_.size(); ++peer) {
    if (parts_[peer].empty()) continue;
    state.data[peer] = reinterpret_cast<unsigned char*>(parts_[peer].data());
    state.signals[peer] = reinterpret_cast<Signals*>(parts_[peer].data() + signalsOffset());
  }
  state.host = reinterpret_cast<HostWords*>(pinned_.data());
  if (proxy_) {
    kernels::Remote& remote = state.remote;
    remote.ranks = remoteOf(rank_);
    remote.proxy = proxy_->view();
    remote.inboxBankBytes = inboxBankStride();
    remote.outgoing = reinterpret_cast<Mails*>(own + outgoingOffset());
    remote.outgoingAt = outgoingOffset();
    for (int peer = 0; peer < state.ranks; ++peer) {
      remote.hosts[peer] = hosts_[size_t(peer)];
      remote.regions[peer] = reinterpret_cast<unsigned char*>(inboxes_[size_t(peer)].data());
      if (!(remote.ranks >> peer & 1)) continue;
      remote.inboxes[peer] =
          reinterpret_cast<unsigned char*>(inboxes_[size_t(rank_)].data()) + inboxAt(rank_, peer);
      remote.inboxAt[peer] = inboxAt(peer, rank_);
    }
  }
  std::memcpy(pinned_.data(), &state, sizeof(state));
  MOONCAKE_TRY(accelerator_.copy(stream_, own + stateOffset(), pinned_.data(), sizeof(state)));
  MOONCAKE_TRY(accelerator_.synchronize(stream_));
  state_ = reinterpret_cast<GroupState*>(own + stateOffset());
  words_ = new (pinned_.data()) HostWords;
  return {};
}

PeerArea::~PeerArea() {
  proxy_.reset();
  if (!pinned_.empty()) accelerator_.freePinned(pinned_);
}

}  // namespace mooncake
