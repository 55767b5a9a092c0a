#include "backend/device/device_calls.h"

#include <algorithm>
#include <utility>

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "backend/arguments.h"
#include "backend/batch_work.h"
#include "backend/calls/collective_calls.h"
#include "backend/device/accelerator_of.h"
#include "backend/device/graph_staging.h"
#include "backend/device/host_staging.h"
#include "backend/device/recorded_calls.h"
#include "backend/device/recorded_work.h"
#include "backend/device/sparse_staging.h"
#include "backend/device/staged_feed.h"
#include "backend/device/stream_mark.h"
#include "backend/device/stream_staging.h"
#include "base/log.h"
#include "peers/peer_sharing.h"

namespace mooncake {
namespace {

bool isOfDevice(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_cpu() && !tensor.is_meta() &&
         c10::impl::hasDeviceGuardImpl(tensor.device().type());
}

// The calls of a batch with tensors of devices, in their order.
struct DeviceBatch {
  std::vector<std::shared_ptr<Staging>> stagings;
  Tensors outputs;           // of these calls
  bool waitsOnHost = false;  // as one of these calls does
};

// The same call on the copies that operations on the host use.
Collective onCopies(const Collective& call, Staging& staging) {
  Collective host = call;
  for (Operand* const operand : {&host.given, &host.result}) {
    const auto copyOf = [&](const at::Tensor& tensor) {
      switch (operand->use) {
        case Operand::Use::kInput:
          return staging.input(tensor, operand->what);
        case Operand::Use::kOutput:
          return staging.output(tensor, operand->what);
        default:
          return staging.inOut(tensor, operand->what);
      }
    };
    for (Tensors& list : operand->lists) std::ranges::transform(list, list.begin(), copyOf);
  }
  // Copies are apart from each other, so nothing else would find that.
  const Tensors results = call.results();
  if (call.output().use == Operand::Use::kOutput && results.size() > 1)
    checkApart(results, call.output().what);
  return host;
}

// Each replay would have to wait for the factor on the host.
void checkFactor(const Staging& staging, const Collective& call) {
  if (staging.mode() != Staging::Mode::kRecords || !call.isPremultiplied()) return;
  if (!isFactorOnDevice(*call.op)) return;
  refuseRecording(staging.stream(),
                  "the factor of PREMUL_SUM is on a device, and the host reads it",
                  "Give a number, or a tensor of the CPU");
}

}  // namespace

Status DeviceCalls::mayMove() {
  const char* held = nullptr;
  if (group_.order().replays()) held = "calls that graphs have recorded";
  if (started_.load()) held = "symmetric memory";
  Lock lock(streamsMutex_);
  if (route_ && route_->hasKernels()) held = "kernels for its collectives";
  if (!held) return {};
  return {ErrorCode::kUnsupported, "group '" + group_.options().groupName + "' on rank " +
                                       std::to_string(group_.rank()) + " has " + held +
                                       ", which cannot go on with a new process yet. Nothing has "
                                       "changed; make a group of the survivors with new_group"};
}

void DeviceCalls::drain(Deadline deadline) {
  if (PeerRoute* const route = madeRoute_) route->drain(deadline);
  if (Replays* const replays = group_.order().replays()) replays->drain(deadline);
}

void DeviceCalls::fail(const Error& why) {
  if (PeerRoute* const route = madeRoute_) route->fail(why);
  if (PeerSharing* const sharing = started_) sharing->fail(why);
}

void DeviceCalls::left() {
  if (PeerSharing* const sharing = started_)
    sharing->fail({ErrorCode::kAborted, LiveGroup::kDestroyed});
  const PeerRoute* const route = madeRoute_;
  if (route && !route->usable().ok()) {
    log(LogLevel::kError, "group '" + group_.options().groupName + "'",
        "operations by kernels have ended with an error: ", route->usable().error().message);
  }
  const UnseenErrors::Unseen unseen = unseen_->first();
  if (!unseen.error || unseen.isRaised->exchange(true)) return;
  try {
    std::rethrow_exception(unseen.error);
  } catch (const std::exception& error) {
    log(LogLevel::kError, "group '" + group_.options().groupName + "'",
        std::string(
            "an operation failed after its wait() had returned, and no later call raised ") +
            "the error: " + error.what());
  }
}

std::shared_ptr<GroupStreams> DeviceCalls::streamsOn(const c10::Device& device) {
  group_.refuseInForkedChild();
  Lock lock(streamsMutex_);
  lastDevice_ = device;
  auto& streams = streams_[{device.type(), device.index()}];
  if (!streams) streams = std::make_shared<GroupStreams>(device, group_.options().streams);
  return streams;
}

std::shared_ptr<Staging> DeviceCalls::stagingOn(const c10::Device& device,
                                                std::chrono::milliseconds timeout) {
  const auto streams = streamsOn(device);
  // The results of calls before this one are not there.
  if (const PeerRoute* const route = madeRoute_) throwIfError(route->usable());
  const c10::Stream callers = currentOn(device);
  if (isCapturing(callers)) {
    return std::make_shared<GraphStaging>(streams, recordedCallsFor(callers, streams),
                                          group_.effective(timeout));
  }
  // A stream that does not come ends the group, so a short timeout of one call is not enough for it.
  const auto limit = std::max(group_.effective(timeout), group_.effective(c10d::kUnsetTimeout));
  std::shared_ptr<Staging> staging;
  if (streams->words()) {
    staging = std::make_shared<StreamStaging>(streams, limit);
  } else {
    staging = std::make_shared<HostStaging>(streams, streams->collectives(), limit);
  }
  staging->onFailure([this](const Error& why) { group_.group()->fail(why); });
  return staging;
}

// Errors of replays come when no caller waits for them, and mode `raise` counts calls.
RecordedCalls& DeviceCalls::recordedCallsFor(const c10::Stream& callers,
                                             const std::shared_ptr<GroupStreams>& streams) {
  if (group_.options().raises)
    refuseRecording(callers, "the group is in mode raise", kOutsideOfCapture);
  if (group_.batches().current())
    refuseRecording(callers, "the call is part of a batch", kOutsideOfCapture);
  throwIfError(group_.group()->usable());
  Lock lock(streamsMutex_);
  if (RecordedCalls* const calls = recordedCalls()) {
    if (calls->stream().device() == callers.device()) return *calls;
    refuseRecording(callers,
                    "graphs of " + calls->stream().device().str() + " have calls of the group",
                    "Use one device for each group");
  }
  auto calls = RecordedCalls::make(*group_.group(), streams,
                                   {.memoryLimit = group_.options().streams.graphMemory,
                                    .limit = group_.effective(c10d::kUnsetTimeout),
                                    .isIdle = [this] { return host_.isIdle(); }});
  if (!calls.ok()) {
    refuseRecording(callers, "the call goes through host memory: " + calls.error().message,
                    kOutsideOfCapture);
  }
  group_.order().use(std::move(*calls));
  return *recordedCalls();
}

// This class alone makes them.
RecordedCalls* DeviceCalls::recordedCalls() const {
  return static_cast<RecordedCalls*>(group_.order().replays());
}

std::shared_ptr<MessageStaging> DeviceCalls::messageStagingFor(const Tensors& tensors, int peer,
                                                               bool isSend) {
  const auto first = std::ranges::find_if(tensors, &at::Tensor::defined);
  if (first == tensors.end() || !isOfDevice(*first)) return nullptr;
  auto staging =
      std::make_shared<MessageStaging>(streamsOn(first->device()), currentOn(first->device()),
                                       group_.effective(c10d::kUnsetTimeout));
  staging->preferDevice([this, peer, isSend](const at::Tensor& tensor) {
    return peerMessages_.find(*group_.group(), tensor, peer, isSend);
  });
  return staging;
}

// If the group is over, wait() has to raise that: no later call of the program may come.
DeviceWork::Waiting DeviceCalls::waiting(bool onHost) {
  return {.unseen = unseen_,
          .earlier = unseen_->first(),
          .onHost = onHost || !group_.group()->usable().ok(),
          .blocks = group_.options().blockingWait,
          .limit = group_.effective(c10d::kUnsetTimeout)};
}

std::shared_ptr<PeerSharing> DeviceCalls::sharing(const c10::Device& device) {
  group_.refuseInForkedChild();
  Lock lock(sharingMutex_);
  if (sharing_) return sharing_;
  const auto timeout = group_.effective(c10d::kUnsetTimeout);
  const auto makeControl = [&](std::function<void(const GroupView&)> onView) {
    return group_.makeGroup("symmetric", 0, 0, false, Deadline::after(timeout), std::move(onView));
  };
  sharing_ = orThrow(PeerSharing::make(makeControl, acceleratorOf(device.type()),
                                       {.device = device.index(), .timeout = timeout}));
  started_ = sharing_.get();
  return sharing_;
}

PeerRoute& DeviceCalls::route() {
  Lock lock(streamsMutex_);
  if (!route_) {
    const auto timeout = group_.effective(c10d::kUnsetTimeout);
    auto makeControl = [this, timeout](std::function<void(const GroupView&)> onView) {
      return group_.makeGroup("peers", 0, 0, false, Deadline::after(timeout), std::move(onView));
    };
    route_ = std::make_unique<PeerRoute>(
        std::move(makeControl),
        PeerRoute::Settings{.name = group_.options().groupName,
                            .bytes = group_.options().streams.peerBytes,
                            .table = group_.options().streams.peerTable,
                            .blocks = group_.options().blockingWait,
                            .capacity = group_.options().capacity,
                            .timeout = timeout,
                            .unseen = unseen_,
                            .onLoss = [ranks = group_.activeRanks()](uint64_t active) {
                              ranks->pushAfter(active);
                            }});
    madeRoute_ = route_.get();
  }
  return *route_;
}

DeviceCalls::WorkPtr DeviceCalls::byKernel(const Collective& call) {
  if (!call.kind->byKernel || !group_.options().streams.peerBytes || group_.options().raises ||
      group_.keepsLost() || group_.batches().current())
    return nullptr;
  const Deadline deadline = Deadline::after(call.timeout);
  const std::optional<KernelRun> run = call.kind->byKernel(call, group_.rank(), group_.size());
  if (!run || !isOfDevice(call.first())) return nullptr;
  const at::Tensor& first = call.first();
  const auto isAlike = [&](const at::Tensor& tensor) {
    return checkDense(tensor, "a tensor").ok() && tensor.device() == first.device() &&
           tensor.scalar_type() == first.scalar_type();
  };
  if (!std::ranges::all_of(call.read(), isAlike) || !std::ranges::all_of(call.written(), isAlike))
    return nullptr;
  auto work = route().run(group_.rank(), streamsOn(first.device()), call, *run, deadline);
  if (work) group_.missingParts().launched(call);
  return work;
}

DeviceCalls::WorkPtr DeviceCalls::deviceWork(const std::shared_ptr<Staging>& staging,
                                             Tensors outputs, WorkPtr host, bool onHost) {
  DeviceWork::Waiting ending{.onHost = true, .limit = group_.effective(c10d::kUnsetTimeout)};
  if (const auto batch = group_.batches().current()) {
    if (!batch->devices) batch->devices = std::make_shared<DeviceBatch>();
    auto& ours = *std::static_pointer_cast<DeviceBatch>(batch->devices);
    ours.stagings.push_back(staging);
    ours.outputs.insert(ours.outputs.end(), outputs.begin(), outputs.end());
    ours.waitsOnHost |= onHost;
    if (!host) return nullptr;  // a call of a batch, which raises at the batch's end
  } else {
    ending = waiting(onHost);  // else the batch's work is the one that is waited for
  }
  const c10d::OpType type = host->retrieveOpType();
  return c10::make_intrusive<DeviceWork>(group_.rank(), type, std::move(host),
                                         std::vector<std::shared_ptr<Staging>>{staging},
                                         std::move(outputs), std::move(ending));
}

// A later call raises its error.
void DeviceCalls::noteReplay(UnseenErrors& unseen, WorkPtr host) {
  if (host->isCompleted() && host->isSuccess()) return;
  (void)unseen.first();  // forgets operations that have ended
  unseen.add(std::move(host), std::make_shared<std::atomic<bool>>(false));
}

// Enqueues the call; its tensors are the staging's copies.
DeviceCalls::WorkPtr DeviceCalls::onHost(const Collective& call,
                                         const std::shared_ptr<Staging>& staging) {
  HostRun run = call.kind->onHost(call, *group_.group());
  const auto work = host_.newWork(call);
  if (staging->mode() == Staging::Mode::kRecords) {
    staging->mark();
    work->endProfile();
    return group_.batches().add(work);
  }
  const auto turn = std::make_shared<StagedTurn>(staging);
  auto inTurn = [turn, staging, parts = &group_.missingParts(), ranks = group_.activeRanks(),
                 run = std::move(run), use = MissingParts::useOf(call),
                 name = call.kind->name](Group& series) {
    return turn->run(series, [&] {
      StagedFeed feed(staging, series);
      Status status = run(series, staging->isCut() ? &feed : nullptr);
      if (status.ok()) parts->ended(use, name, series);
      ranks->push();  // ahead of the outputs
      return status;
    });
  };
  CallOrder& order = group_.order();
  const bool isReplay = staging->mode() == Staging::Mode::kReplays;
  const auto submit = [&] {
    staging->mark();
    group_.queue()->submit(work, !isReplay && (call.isAsync || staging->isOrdered()),
                           std::move(inTurn));
  };
  if (isReplay || !(staging->isOrdered() || order.replays())) {
    submit();
  } else {
    // No other call may come between the mark and the place in the queue.
    const Guard inOrder(order.mutex());
    if (order.replays()) {
      order.follow(
          group_.line(), group_.queue(), work, [&] { staging->mark(); }, std::move(inTurn));
    } else {
      submit();
    }
  }
  return group_.batches().add(work);
}

DeviceCalls::WorkPtr DeviceCalls::staged(const std::shared_ptr<Staging>& staging, Tensors outputs,
                                         Collective host, bool waitsOnHost) {
  WorkPtr work = onHost(host, staging);
  if (staging->mode() != Staging::Mode::kRecords)
    return deviceWork(staging, std::move(outputs), std::move(work), waitsOnHost);
  const auto graph = std::static_pointer_cast<GraphStaging>(staging);
  recordedCalls()->keep(graph, [this, unseen = unseen_,
                                host = std::move(host)](const std::shared_ptr<Staging>& replay) {
    noteReplay(*unseen, onHost(host, replay));
  });
  return c10::make_intrusive<RecordedWork>(group_.rank(), work->retrieveOpType(), graph->stream(),
                                           std::move(outputs));
}

std::optional<DeviceCalls::WorkPtr> DeviceCalls::carryOut(const Collective& call) {
  const at::Tensor* const leading = call.leading();
  if (call.kind->isSparse && isOfDevice(*leading)) return sparse(call);
  if (auto work = byKernel(call)) return work;
  if (!leading || !isOfDevice(*leading)) return std::nullopt;
  const auto staging = stagingOn(leading->device(), call.timeout);
  checkFactor(*staging, call);
  Collective host = onCopies(call, *staging);
  if (call.kind->cut) staging->cutInputs(call.kind->cut(host, group_.size()));
  return staged(staging, call.results(), std::move(host));
}

DeviceCalls::WorkPtr DeviceCalls::sparse(const Collective& call) {
  const at::Tensor& tensor = call.first();
  const auto streams = streamsOn(tensor.device());
  const auto staging = std::make_shared<SparseStaging>(
      streams, streams->messages(currentOn(tensor.device())), call.timeout);
  staging->onFailure([this](const Error& why) { group_.group()->fail(why); });
  Collective host = call;
  host.given.lists[0][0] = staging->sparse(tensor, call.given.what);
  return staged(staging, call.results(), std::move(host));
}

std::optional<DeviceCalls::WorkPtr> DeviceCalls::barrier(const c10d::BarrierOptions& opts) {
  std::optional<c10::Device> device = opts.device;
  if (!device || device->is_cpu()) {  // torch names the CPU for a group of several device types
    Lock lock(streamsMutex_);
    device = lastDevice_;
  }
  if (!device || device->is_cpu()) return std::nullopt;
  if (!device->has_index()) device = c10::impl::VirtualGuardImpl(device->type()).getDevice();
  refuseCapture(currentOn(*device), "a barrier waits on the host");
  Collective call = barrierCall(opts);
  call.timeout = group_.effective(call.timeout);
  const auto staging = stagingOn(*device, call.timeout);
  return staged(staging, {}, std::move(call), /*waitsOnHost=*/true);
}

DeviceCalls::WorkPtr DeviceCalls::ofBatch(Coalescing::Batch& batch, WorkPtr host) {
  if (!batch.devices) return host;
  auto& ours = *std::static_pointer_cast<DeviceBatch>(batch.devices);
  const auto& calls = dynamic_cast<BatchWork&>(*host).works();
  const bool onHost = ours.waitsOnHost || calls.size() != ours.stagings.size();
  return c10::make_intrusive<DeviceWork>(group_.rank(), c10d::OpType::COALESCED, std::move(host),
                                         std::move(ours.stagings), std::move(ours.outputs),
                                         waiting(onHost));
}

std::optional<DeviceCalls::WorkPtr> DeviceCalls::post(c10d::OpType type, const Tensors& tensors,
                                                      int peer, int tag) {
  const bool isSend = type == c10d::OpType::SEND;
  const auto staging = messageStagingFor(tensors, peer, isSend);
  if (!staging) return std::nullopt;
  Tensors host;
  for (const at::Tensor& tensor : tensors) {
    host.push_back(isSend ? staging->input(tensor, "the tensor of send")
                          : staging->output(tensor, "the tensor of recv"));
  }
  if (isSend) messages_.check(type, host, peer, tag);
  staging->mark();
  // Of a message from any rank, the caller asks for the sender after wait().
  return deviceWork(staging, tensors, messages_.post(type, host, peer, tag, staging),
                    /*waitsOnHost=*/type == c10d::OpType::RECVANYSOURCE);
}

}  // namespace mooncake
