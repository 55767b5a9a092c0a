#include "peers/peer_queue.h"

#include <algorithm>
#include <span>
#include <thread>
#include <utility>

#include "base/failpoint.h"
#include "base/log.h"
#include "collectives/collectives.h"
#include "device/kernel_launch.h"
#include "device/stream_queues.h"
#include "kernels/kernel_id.h"
#include "peers/allocation_exchange.h"

namespace mooncake {
namespace {

constexpr auto kGrace = std::chrono::seconds(10);   // for the host to decide after a timeout
constexpr auto kEndTime = std::chrono::seconds(5);  // for a proxy to end rings; less than kGrace
// Most ranks that are late come within this time. A kernel that has stopped goes on with one block.
constexpr auto kPatience = std::chrono::milliseconds(50);

// The host decides by then, unless it is out of order.
uint64_t decisionNs(Deadline deadline) {
  return uint64_t(std::min<int64_t>(deadline.left().count(), int64_t(1) << 62)) +
         uint64_t(std::chrono::nanoseconds(kGrace).count());
}

}  // namespace

Result<std::unique_ptr<PeerQueue>> PeerQueue::make(std::unique_ptr<Group> control,
                                                   std::shared_ptr<ViewFeed> view,
                                                   Result<Accelerator*> accelerator,
                                                   DeviceStream stream, const Settings& settings,
                                                   Deadline deadline) {
  MOONCAKE_TRY(agreeOnAll(*control, accelerator.status(), deadline));
  std::unique_ptr<PeerQueue> made(
      new PeerQueue(std::move(control), std::move(view), **accelerator, stream));
  // The host decides within the timeout, unless it is out of order.
  const auto decision = settings.timeout + kGrace;
  auto area = PeerArea::make(*made->control_, **accelerator, stream,
                             {.banks = settings.banks,
                              .bankBytes = settings.bankBytes,
                              .inboxBankBytes = settings.inboxBankBytes,
                              .patience = kPatience,
                              .decision = decision},
                             deadline);
  if (!area.ok()) return area.error();
  made->area_ = std::move(*area);
  made->decisionNs_ = uint64_t(std::chrono::nanoseconds(decision).count());
  const Status started = made->start(settings);
  MOONCAKE_TRY(agreeOnAll(*made->control_, started, deadline));
  MOONCAKE_TRY(made->agreeOnBlocks(deadline));
  made->guard_->arm();
  return made;
}

Status PeerQueue::start(const Settings& settings) {
  const KernelLaunch largest{
      .kernel = KernelId::kMove, .grid = settings.mostBlocks, .block = kMostThreads};
  const auto room = accelerator_.roomFor(largest, stream_.device);
  if (!room.ok()) return room.error();
  mostBlocks_ = uint32_t(std::clamp(room->multiprocessors, 1, int(settings.mostBlocks)));
  if (settings.maySkip || spansHosts()) {
    const auto queues = accelerator_.streamQueues(stream_.device);
    if (!queues.ok()) return queues.error();
    MOONCAKE_TRY((*queues)->checkPrompt());  // for acknowledge(), and for copies of the proxy
    if (settings.maySkip) {
      const auto beside = (*queues)->take(StreamRole::kStops);
      if (!beside.ok()) return beside.error();
      beside_ = *beside;
    }
  }
  auto guard = PeerGuard::make(
      *control_, *view_, area_->words(), settings.banks,
      {.acknowledge = [this] { return acknowledge(); },
       .isBeside = settings.maySkip,
       .endsOf = [proxy = area_->proxy()](
                     uint64_t ranks) { return proxy ? proxy->endsOf(ranks) : std::string(); },
       .onLoss =
           [this, onLoss = settings.onLoss](uint64_t active) {
             if (onLoss) onLoss(active);
             return endRings(~active);
           }},
      settings.timeout);
  if (!guard.ok()) return guard.error();
  guard_ = std::move(*guard);
  return {};
}

// The ranks' kernels must have as many blocks, and their devices may differ.
Status PeerQueue::agreeOnBlocks(Deadline deadline) {
  return allreduce(*control_, std::as_writable_bytes(std::span(&mostBlocks_, 1)),
                   {DType::kUInt32, ReduceKind::kMin}, deadline);
}

PeerQueue::~PeerQueue() {
  guard_.reset();  // first: it ends kernels that wait
  if (!area_) return;
  // Replays that come later find the refusal on the device. An error shows below.
  if (order_.hasGraphs()) (void)acknowledge();
  Status over = accelerator_.synchronize(stream_);
  if (beside_ && over.ok()) over = accelerator_.synchronize(*beside_);
  const auto queues = accelerator_.streamQueues(stream_.device);
  if (beside_ && over.ok() && queues.ok()) (*queues)->giveBack(*beside_);
  if (!over.ok()) {
    log(LogLevel::kWarning, accelerator_.name(),
        "kernels of a group may still run, so their memory stays: ", over.error().message);
  }
  // Also if the group has failed: other ranks find the same failure by this one's data.
  if (over.ok() && spansHosts()) area_->proxy()->flush(Deadline::after(kGrace));
  if (over.ok() && !order_.hasGraphs()) return;
  if (area_->proxy()) area_->proxy()->close();
  (void)area_.release();
}

Status PeerQueue::acknowledge() {
  kernels::AcknowledgeArguments arguments{area_->state()};
  return accelerator_.launch(beside_.value_or(stream_),
                             {.kernel = KernelId::kAcknowledge, .arguments = bytesOf(arguments)});
}

// The kernels write to their published memory again once they go on.
Status PeerQueue::endRings(uint64_t lost) const {
  return spansHosts() ? area_->proxy()->end(lost, Deadline::after(kEndTime)) : Status();
}

void PeerQueue::drain(Deadline deadline) const {
  (void)guard_->await(guard_->lastCall(), deadline);
  while (guard_->usable().ok() && !deadline.passed()) {
    const auto isOver = order_.isOver();
    if (!isOver.ok() || *isOver) break;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  if (guard_->usable().ok() && spansHosts()) area_->proxy()->flush(deadline);
}

kernels::Exchange PeerQueue::exchange(uint32_t call, Deadline deadline,
                                      Clock::duration skipAfter) const {
  return {.state = area_->state(),
          .call = call,
          .decisionNs = recording_ ? decisionNs_ : decisionNs(deadline),
          .root = -1,
          .pieces = 1,
          .piece = 0,
          .bytes = 0,
          .isTwoShot = false,
          .readers = kernels::Readers::kOwnPart,
          .inputCount = 0,
          .inputs = {},
          .scratch = nullptr,
          .output = nullptr,
          .isOfGraph = recording_.has_value(),
          .isHeld = recording_.has_value() || beside_.has_value(),
          .skipNs = uint64_t(std::chrono::nanoseconds(skipAfter).count())};
}

Result<uint64_t> PeerQueue::begin(const std::string& name, Deadline deadline) {
  if (recording_) return 0;
  return guard_->begin(name, deadline);
}

Status PeerQueue::launch(const KernelLaunch& launch) {
  if (recording_) return record(launch);
  failpoint("peers-launch");
  Status launched = order_.beforeCall();
  if (launched.ok()) launched = accelerator_.launch(stream_, launch);
  if (launched.ok() && spansHosts()) area_->proxy()->wake();
  if (launched.ok()) launched = order_.afterCall();
  // The ranks would count differently.
  if (!launched.ok()) guard_->fail(launched.error());
  return launched;
}

Status PeerQueue::record(const KernelLaunch& launch) {
  if (!isOrdered_) MOONCAKE_TRY(order_.beforeGraph(*recording_));
  isOrdered_ = true;
  MOONCAKE_TRY(accelerator_.launch(*recording_, launch));
  return order_.afterGraphs(*recording_);
}

}  // namespace mooncake
