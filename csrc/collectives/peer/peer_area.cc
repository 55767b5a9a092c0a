#include "collectives/peer/peer_area.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "device/device_env.h"
#include "device/peer_memory.h"

namespace mooncake {
namespace {

using kernels::GroupState;
using kernels::HostWords;
using kernels::Signals;

constexpr size_t kAlignment = 256;
size_t alignedUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

size_t PeerArea::halfStride() const { return alignedUp(settings_.halfBytes); }
size_t PeerArea::signalsOffset() const { return 2 * halfStride(); }
size_t PeerArea::stateOffset() const { return signalsOffset() + alignedUp(sizeof(Signals)); }

Result<std::unique_ptr<PeerArea>> PeerArea::make(Group& group, Accelerator& accelerator,
                                                 DeviceStream stream, const Settings& settings,
                                                 Deadline deadline) {
  std::unique_ptr<PeerArea> area(new PeerArea(accelerator, stream, settings));
  const auto own = area->allocate(group);
  MOONCAKE_TRY(agreeOnAll(group, own.ok() ? Status() : Status(own.error()), deadline));
  auto allocations = exchangeAllocations(group, *own, deadline);
  if (!allocations.ok()) return allocations.error();
  Status mine = area->mapAll(*allocations);
  if (mine.ok()) mine = area->initialize();
  MOONCAKE_TRY(agreeOnAll(group, mine, deadline));
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
  const auto pinned = accelerator_.allocatePinned(
      alignedUp(std::max({sizeof(HostWords), sizeof(GroupState), sizeof(Signals)})));
  if (!pinned.ok()) return pinned.error();
  pinned_ = *pinned;
  mappings_.emplace(*memory, PeerMappings::Settings{.device = stream_.device,
                                                    .owner = uint64_t(group.rank()),
                                                    .limit = env->peerMemory});
  const size_t bytes = stateOffset() + alignedUp(sizeof(GroupState));
  const auto own = mappings_->allocate(bytes, group.lastView->epoch);
  if (!own.ok()) return own.error();
  rank_ = group.rank();
  parts_.resize(ranks);
  parts_[size_t(rank_)] = own->memory;
  auto descriptor = mappings_->descriptorOf(own->allocation);
  if (!descriptor.ok()) return descriptor.error();
  return SharedAllocation{own->allocation, std::move(*descriptor)};
}

Status PeerArea::mapAll(std::vector<SharedAllocation>& allocations) {
  for (size_t peer = 0; peer < allocations.size(); ++peer) {
    if (int(peer) == rank_) continue;
    SharedAllocation& theirs = allocations[peer];
    if (theirs.allocation.bytes < parts_[size_t(rank_)].size())
      return {ErrorCode::kMismatch, theirs.allocation.text() + " is smaller than the other ranks'"};
    const auto mapped = mappings_->open(
        theirs.allocation, [&]() -> Result<Fd> { return std::move(theirs.descriptor); });
    if (!mapped.ok()) return mapped.error();
    parts_[peer] = mapped->memory;
  }
  return {};
}

// Fills in the device's memory, by way of pinned memory.
Status PeerArea::initialize() {
  GroupState state;
  state.rank = rank_;
  state.ranks = int(parts_.size());
  state.active = ~uint64_t(0) >> (64 - parts_.size());
  state.patienceNs = uint64_t(settings_.patience.count());
  state.decisionNs = uint64_t(settings_.decision.count());
  state.halfBytes = halfStride();
  for (size_t peer = 0; peer < parts_.size(); ++peer) {
    state.data[peer] = reinterpret_cast<unsigned char*>(parts_[peer].data());
    state.signals[peer] = reinterpret_cast<Signals*>(parts_[peer].data() + signalsOffset());
  }
  state.host = reinterpret_cast<HostWords*>(pinned_.data());
  std::byte* const own = parts_[size_t(rank_)].data();
  std::memset(pinned_.data(), 0, sizeof(Signals));
  MOONCAKE_TRY(accelerator_.copy(stream_, own + signalsOffset(), pinned_.data(), sizeof(Signals)));
  MOONCAKE_TRY(accelerator_.synchronize(stream_));
  std::memcpy(pinned_.data(), &state, sizeof(state));
  MOONCAKE_TRY(accelerator_.copy(stream_, own + stateOffset(), pinned_.data(), sizeof(state)));
  MOONCAKE_TRY(accelerator_.synchronize(stream_));
  state_ = reinterpret_cast<GroupState*>(own + stateOffset());
  words_ = new (pinned_.data()) HostWords;
  return {};
}

PeerArea::~PeerArea() {
  if (!pinned_.empty()) accelerator_.freePinned(pinned_);
}

}  // namespace mooncake
