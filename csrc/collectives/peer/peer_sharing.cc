#include "collectives/peer/peer_sharing.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <string>
#include <utility>

#include "base/deadline.h"
#include "base/log.h"
#include "device/kernel_launch.h"

namespace mooncake {

using kernels::Missed;
using kernels::SignalWords;

// Tells kernels the ranks that are lost. Thread-safe.
class PeerSharing::LostRanks {
 public:
  void show(const GroupView& view) {
    uint64_t active = 0;
    for (const int rank : view.active) active |= uint64_t(1) << rank;
    std::lock_guard lock(mutex_);
    lost_ = ~active;
    tell();
  }
  // Null: no more.
  void tellTo(SignalWords* words) {
    std::lock_guard lock(mutex_);
    words_ = words;
    tell();
  }

 private:
  void tell() const {
    if (words_) std::atomic_ref(words_->lost).store(lost_);
  }

  std::mutex mutex_;  // guards the fields below
  uint64_t lost_ = 0;
  SignalWords* words_ = nullptr;
};

PeerSharing::PeerSharing(Accelerator* accelerator, const Settings& settings)
    : accelerator_(accelerator), settings_(settings), lost_(std::make_shared<LostRanks>()) {}

PeerSharing::~PeerSharing() {
  lost_->tellTo(nullptr);
  if (!pinned_.empty()) accelerator_->freePinned(pinned_);
}

Result<std::shared_ptr<PeerSharing>> PeerSharing::make(const MakeGroup& makeGroup,
                                                       Result<Accelerator*> accelerator,
                                                       const Settings& settings) {
  std::shared_ptr<PeerSharing> made(
      new PeerSharing(accelerator.ok() ? *accelerator : nullptr, settings));
  made->control_ = makeGroup([lost = made->lost_](const GroupView& view) { lost->show(view); });
  const Status mine = accelerator.ok() ? made->prepare() : accelerator.status();
  MOONCAKE_TRY(agreeOnAll(*made->control_, mine, Deadline::after(settings.timeout)));
  made->lost_->tellTo(made->words_);
  return made;
}

Status PeerSharing::prepare() {
  if (size() > kernels::kMaxRanks) {
    return {ErrorCode::kUnsupported, "kernels take at most " + std::to_string(kernels::kMaxRanks) +
                                         " ranks, and the group has " + std::to_string(size())};
  }
  PeerMemory* const memory = accelerator_->peerMemory();
  if (!memory)
    return {ErrorCode::kUnsupported, std::string(accelerator_->name()) + " has no devices"};
  MOONCAKE_TRY(memory->checkSharing(settings_.device));
  MOONCAKE_TRY(accelerator_->prepareKernels(settings_.device));
  const auto pinned = accelerator_->allocatePinned(sizeof(SignalWords));
  if (!pinned.ok()) return pinned.error();
  pinned_ = *pinned;
  words_ = new (pinned_.data()) SignalWords;
  return {};
}

Result<std::vector<std::span<std::byte>>> PeerSharing::mapAll(const SharedAllocation& own,
                                                              std::span<std::byte> memory) {
  std::lock_guard lock(controlMutex_);
  const Deadline deadline = Deadline::after(settings_.timeout);
  const auto shared = exchangeAllocations(*control_, own, deadline);
  if (!shared.ok()) return shared.error();
  std::vector<std::span<std::byte>> all(shared->size());
  all[size_t(rank())] = memory;
  const Status mine = mapTheirs(*shared, all);
  const Status agreed = agreeOnAll(*control_, mine, deadline);
  if (agreed.ok()) return all;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank() && !all[size_t(peer)].empty()) unmap(all[size_t(peer)]);
  }
  return agreed.error();
}

Status PeerSharing::mapTheirs(const std::vector<SharedAllocation>& shared,
                              std::vector<std::span<std::byte>>& all) {
  const uint64_t bytes = shared[size_t(rank())].allocation.bytes;
  for (int peer = 0; peer < size(); ++peer) {
    const SharedAllocation& theirs = shared[size_t(peer)];
    if (theirs.allocation.bytes != bytes) {
      return {ErrorCode::kMismatch, control_->nameRank(peer) + " has allocated " +
                                        std::to_string(theirs.allocation.bytes) + " bytes, and " +
                                        control_->nameRank(rank()) + " " + std::to_string(bytes)};
    }
    if (peer == rank()) continue;
    const auto mapped =
        accelerator_->peerMemory()->mapShared(theirs.descriptor, bytes, settings_.device);
    if (!mapped.ok()) return mapped.error();
    all[size_t(peer)] = *mapped;
  }
  return {};
}

void PeerSharing::unmap(std::span<std::byte> memory) {
  const Status unmapped = accelerator_->peerMemory()->unmapShared(memory);
  if (!unmapped.ok()) log(LogLevel::kWarning, accelerator_->name(), unmapped.error().message);
}

Status PeerSharing::signal(DeviceStream stream, const std::vector<uint32_t*>& pads,
                           const Signals& signals) {
  MOONCAKE_TRY(missed(signals.name));
  MOONCAKE_TRY(control_->usable());
  const std::chrono::nanoseconds timeout =
      signals.timeout.count() > 0 ? signals.timeout : settings_.timeout;
  kernels::SignalArguments arguments{.host = words_,
                                     .pads = {},
                                     .rank = rank(),
                                     .ranks = size(),
                                     .channel = signals.channel,
                                     .puts = signals.puts,
                                     .waits = signals.waits,
                                     .timeoutNs = uint64_t(timeout.count())};
  std::ranges::copy(pads, arguments.pads);
  return accelerator_->launch(
      stream,
      {.kernel = KernelId::kSignal, .block = kernels::kMaxRanks, .arguments = bytesOf(arguments)});
}

Status PeerSharing::missed(const char* name) const {
  for (int peer = 0; peer < size(); ++peer) {
    const auto missed = Missed(std::atomic_ref(words_->missed[peer]).load());
    if (missed == Missed::kNone) continue;
    const std::string text = std::string(name) + ": an earlier signal has waited in vain for " +
                             control_->nameRank(peer);
    if (missed == Missed::kLate)
      return {ErrorCode::kTimeout, text + ", which did not come within the timeout"};
    return {ErrorCode::kPeerLost, text + ", which is lost: " + control_->whyGone(peer)};
  }
  return {};
}

}  // namespace mooncake
