#include "peers/peer_sharing.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "base/deadline.h"
#include "base/log.h"
#include "collectives/collectives.h"
#include "device/kernel_launch.h"
#include "kernels/kernel_id.h"

namespace mooncake {

using kernels::Missed;
using kernels::SignalWords;

// Ends the waits of kernels when a rank is lost, or the object has failed. Thread-safe.
class PeerSharing::LostRanks {
 public:
  void show(const GroupView& view) {
    Lock lock(mutex_);
    active_ = view.active;
    tell();
  }
  void fail(const Error& why) {
    Lock lock(mutex_);
    if (!failure_) failure_ = why;
    tell();
  }
  // Null: no more.
  void tellTo(SignalWords* words, int size) {
    Lock lock(mutex_);
    words_ = words;
    size_ = size;
    tell();
  }
  std::optional<Error> failure() const {
    Lock lock(mutex_);
    return failure_;
  }
  // The first rank that is lost; -1: none.
  int first() const {
    Lock lock(mutex_);
    for (int rank = 0; active_ && rank < size_; ++rank) {
      if (std::ranges::find(*active_, rank) == active_->end()) return rank;
    }
    return -1;
  }

 private:
  void tell() const REQUIRES(mutex_) {
    if (!words_) return;
    const bool isLost = failure_ || (active_ && int(active_->size()) < size_);
    std::atomic_ref(words_->lost).store(isLost);
  }

  mutable Mutex mutex_;
  std::optional<std::vector<int>> active_ GUARDED_BY(mutex_);
  std::optional<Error> failure_ GUARDED_BY(mutex_);
  SignalWords* words_ GUARDED_BY(mutex_) = nullptr;
  int size_ GUARDED_BY(mutex_) = 0;
};

PeerSharing::PeerSharing(Accelerator* accelerator, const Settings& settings)
    : accelerator_(accelerator), settings_(settings), lost_(std::make_shared<LostRanks>()) {}

PeerSharing::~PeerSharing() {
  if (forkGeneration_ != forkGeneration()) {  // all this is the parent's
    (void)control_.release();
    return;
  }
  lost_->tellTo(nullptr, 0);
}

Result<std::shared_ptr<PeerSharing>> PeerSharing::make(const MakeGroup& makeGroup,
                                                       Result<Accelerator*> accelerator,
                                                       const Settings& settings) {
  std::shared_ptr<PeerSharing> made(
      new PeerSharing(accelerator.ok() ? *accelerator : nullptr, settings));
  made->control_ = makeGroup([lost = made->lost_](const GroupView& view) { lost->show(view); });
  const Status mine = accelerator.ok() ? made->prepare() : accelerator.status();
  MOONCAKE_TRY(made->agree(mine, Deadline::after(settings.timeout)));
  made->lost_->tellTo(made->words_.get(), made->size());
  return made;
}

Status PeerSharing::agree(const Status& mine, Deadline deadline) {
  MOONCAKE_TRY(agreeOnAll(*control_, mine, deadline));
  if (int(control_->lastView->active.size()) == size()) return {};
  return {ErrorCode::kPeerLost, "a member of the group is lost"};
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
  words_ = {new (pinned->data()) SignalWords,
            [accelerator = accelerator_, memory = *pinned](SignalWords*) {
              accelerator->freePinned(memory);
            }};
  return {};
}

Result<std::vector<std::span<std::byte>>> PeerSharing::mapAll(const Result<Offer>& mine) {
  Lock lock(controlMutex_);
  const Deadline deadline = Deadline::after(settings_.timeout);
  ++called_;
  MOONCAKE_TRY(agree(mine.status(), deadline));
  const auto isKnown = agreeOnOffers(*mine, deadline);
  if (!isKnown.ok()) return isKnown.error();
  std::vector<std::span<std::byte>> all;
  if (*isKnown) return all;
  const auto shared = exchangeAllocations(*control_, *mine->allocation, deadline);
  if (!shared.ok()) return shared.error();
  MOONCAKE_TRY(requireOneHost(*control_, shared->hosts));
  all.resize(shared->allocations.size());
  all[size_t(rank())] = mine->memory;
  const Status mapped = mapTheirs(shared->allocations, all);
  const Status agreed = agree(mapped, deadline);
  if (agreed.ok()) return all;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank() && !all[size_t(peer)].empty()) unmap(all[size_t(peer)]);
  }
  return agreed.error();
}

// Returns whether all ranks know the result. Ranks must be in the same call, with memory of the same
// layout.
Result<bool> PeerSharing::agreeOnOffers(const Offer& mine, Deadline deadline) {
  struct Block {
    uint64_t called;
    std::array<uint64_t, 3> layout;
    uint64_t isKnown;
  };
  const Block own{called_, mine.layout, mine.isKnown};
  std::vector<Block> blocks(static_cast<size_t>(size()));
  std::vector<Span> places;
  for (Block& block : blocks) places.push_back(std::as_writable_bytes(std::span(&block, 1)));
  MOONCAKE_TRY(
      allgather(*control_, std::as_bytes(std::span(&own, 1)), places, DType::kUInt8, deadline));
  bool isKnown = true;
  Status fits;
  for (int peer = 0; peer < size(); ++peer) {
    const Block& theirs = blocks[size_t(peer)];
    isKnown = isKnown && theirs.isKnown;
    if (!fits.ok() || (theirs.called == own.called && theirs.layout == own.layout)) continue;
    const bool isLayout = theirs.called == own.called;
    fits = {ErrorCode::kMismatch,
            control_->nameRank(peer) + (isLayout ? " has allocated " : " is in rendezvous ") +
                std::to_string(isLayout ? theirs.layout[0] : theirs.called) +
                (isLayout ? " bytes, or has another signal pad, and " : " of the group, and ") +
                control_->nameRank(rank()) + (isLayout ? " has " : " in ") +
                std::to_string(isLayout ? own.layout[0] : own.called)};
  }
  MOONCAKE_TRY(agree(fits, deadline));
  return isKnown;
}

Status PeerSharing::mapTheirs(const std::vector<SharedAllocation>& shared,
                              std::vector<std::span<std::byte>>& all) {
  const uint64_t bytes = shared[size_t(rank())].allocation.bytes;
  for (int peer = 0; peer < size(); ++peer) {
    const SharedAllocation& theirs = shared[size_t(peer)];
    if (peer == rank()) continue;
    if (theirs.allocation.bytes != bytes)
      return {ErrorCode::kMismatch, theirs.allocation.text() + " has another size than ours"};
    const auto mapped =
        accelerator_->peerMemory()->mapShared(theirs.descriptor, bytes, settings_.device);
    if (!mapped.ok()) return mapped.error();
    all[size_t(peer)] = *mapped;
  }
  return {};
}

// No work uses the memory any more.
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
  kernels::SignalArguments arguments{.host = words_.get(),
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

void PeerSharing::fail(const Error& why) {
  lost_->fail(why);
  control_->fail(why);
}

Status PeerSharing::missed(const char* name) const {
  if (const auto failure = lost_->failure()) return *failure;
  const std::string call(name);
  if (const int rank = lost_->first(); rank >= 0) {
    return {ErrorCode::kPeerLost, call + ": " + control_->nameRank(rank) +
                                      " is lost: " + control_->whyGone(rank) +
                                      ". The memory can still be read; signals need a new group"};
  }
  for (int peer = 0; peer < size(); ++peer) {
    if (Missed(std::atomic_ref(words_->missed[peer]).load()) == Missed::kNone) continue;
    return {ErrorCode::kTimeout, call + ": an earlier signal has waited in vain for " +
                                     control_->nameRank(peer) +
                                     ", which did not come within the timeout"};
  }
  return {};
}

}  // namespace mooncake
