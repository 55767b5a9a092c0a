#include "backend/device/device_backend.h"

#include <algorithm>
#include <utility>

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "backend/arguments.h"
#include "backend/batch_work.h"
#include "backend/device/accelerator_of.h"
#include "backend/device/graph_staging.h"
#include "backend/device/host_staging.h"
#include "backend/device/recorded_calls.h"
#include "backend/device/recorded_work.h"
#include "backend/device/sparse_staging.h"
#include "backend/device/stream_staging.h"
#include "base/log.h"
#include "collectives/peer/peer_sharing.h"

namespace mooncake {
namespace {

using Tensors = std::vector<at::Tensor>;

bool isOfDevice(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_cpu() && !tensor.is_meta() &&
         c10::impl::hasDeviceGuardImpl(tensor.device().type());
}

const at::Tensor* firstDefined(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) return &tensor;
  }
  return nullptr;
}

c10::Stream currentStream(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const Tensors& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

Tensors inputs(Staging& staging, const Tensors& tensors, const char* what) {
  Tensors copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(staging.input(tensor, what));
  return copies;
}

Tensors outputs(Staging& staging, const Tensors& tensors, const char* what) {
  Tensors copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(staging.output(tensor, what));
  return copies;
}

std::vector<Tensors> inputs(Staging& staging, const std::vector<Tensors>& lists, const char* what) {
  std::vector<Tensors> copies;
  for (const Tensors& list : lists) copies.push_back(inputs(staging, list, what));
  return copies;
}

// Outputs of one operation. On the device, no two of them may share memory.
std::vector<Tensors> outputs(Staging& staging, const std::vector<Tensors>& lists,
                             const char* what) {
  std::vector<Tensors> copies;
  for (const Tensors& list : lists) copies.push_back(outputs(staging, list, what));
  checkApart(flat(lists), what);
  return copies;
}

// Each replay would have to wait for the factor on the host.
void checkFactor(const Staging& staging, const c10d::ReduceOp& op) {
  if (staging.mode() != Staging::Mode::kRecords || op != c10d::ReduceOp::PREMUL_SUM) return;
  if (!isFactorOnDevice(op)) return;
  refuseRecording(staging.stream(),
                  "the factor of PREMUL_SUM is on a device, and the host reads it",
                  "Give a number, or a tensor of the CPU");
}

// Lets an operation on enough data begin before all of it is copied. `part`: of the given size on
// all ranks. Each input has `ofEach` of them, and all inputs of a rank `parts`.
void feedPieces(Staging& staging, const at::Tensor& part, size_t parts = 1, size_t ofEach = 1) {
  const size_t bytes = part.nbytes(), pieceBytes = fedPieceBytes(bytes, parts);
  if (pieceBytes < bytes) staging.cutInputs({pieceBytes, ofEach, {}});
}

// The same for all_to_all. Each rank cuts its own input: `inputs` are one for each rank, or one with a
// part of so many elements for each.
void feedParts(Staging& staging, const Tensors& inputs, std::vector<int64_t> lengths = {}) {
  size_t longest = 0, all = 0;
  const auto count = [&](size_t bytes) {
    longest = std::max(longest, bytes);
    all += bytes;
  };
  for (const at::Tensor& input : inputs) {
    if (lengths.empty()) count(input.nbytes());
  }
  for (const int64_t length : lengths) count(size_t(length) * inputs[0].element_size());
  const size_t pieceBytes = splitPieceBytesOf(longest, all);
  if (pieceBytes < longest) staging.cutInputs({pieceBytes, 1, std::move(lengths)});
}

// The same for a reduction. A factor is multiplied with the whole tensor.
void feedReduction(Staging& staging, const c10d::ReduceOp& op, const at::Tensor& part,
                   size_t parts = 1, size_t ofEach = 1) {
  if (op != c10d::ReduceOp::PREMUL_SUM) feedPieces(staging, part, parts, ofEach);
}

}  // namespace

void DeviceBackend::drainDevice(Deadline deadline) {
  if (route_) route_->drain(deadline);
  if (RecordedCalls* const calls = recordedCalls()) calls->drain(deadline);
}

void DeviceBackend::abort() {
  const Error why{ErrorCode::kAborted, "the process group was aborted"};
  if (route_) route_->fail(why);
  if (PeerSharing* const sharing = started_) sharing->fail(why);
  MooncakeBackend::abort();
}

void DeviceBackend::shutdown() {
  MooncakeBackend::shutdown();
  if (PeerSharing* const sharing = started_)
    sharing->fail({ErrorCode::kAborted, "the process group was destroyed"});
  if (route_ && !route_->usable().ok()) {
    log(LogLevel::kError, "group '" + options().groupName + "'",
        "operations by kernels have ended with an error: ", route_->usable().error().message);
  }
  const UnseenErrors::Unseen unseen = unseen_->first();
  if (!unseen.error || unseen.isRaised->exchange(true)) return;
  try {
    std::rethrow_exception(unseen.error);
  } catch (const std::exception& error) {
    log(LogLevel::kError, "group '" + options().groupName + "'",
        std::string(
            "an operation failed after its wait() had returned, and no later call raised ") +
            "the error: " + error.what());
  }
}

std::shared_ptr<GroupStreams> DeviceBackend::streamsOn(const c10::Device& device) {
  refuseInForkedChild();
  std::lock_guard lock(streamsMutex_);
  lastDevice_ = device;
  auto& streams = streams_[{device.type(), device.index()}];
  if (!streams) streams = std::make_shared<GroupStreams>(device, options().streams);
  return streams;
}

std::shared_ptr<Staging> DeviceBackend::stagingOn(const c10::Device& device,
                                                  std::chrono::milliseconds timeout) {
  const auto streams = streamsOn(device);
  // The results of calls before this one are not there.
  if (route_) throwIfError(route_->usable());
  const c10::Stream callers = currentStream(device);
  if (isCapturing(callers)) {
    return std::make_shared<GraphStaging>(streams, recordedCallsFor(callers, streams),
                                          effective(timeout));
  }
  // A stream that does not come ends the group, so a short timeout of one call is not enough for it.
  const auto limit = std::max(effective(timeout), effective(c10d::kUnsetTimeout));
  std::shared_ptr<Staging> staging;
  if (streams->words()) {
    staging = std::make_shared<StreamStaging>(streams, limit);
  } else {
    staging = std::make_shared<HostStaging>(streams, streams->collectives(), limit);
  }
  staging->onFailure([this](const Error& why) { group().fail(why); });
  return staging;
}

// Errors of replays come when no caller waits for them, and mode `raise` counts calls.
RecordedCalls& DeviceBackend::recordedCallsFor(const c10::Stream& callers,
                                               const std::shared_ptr<GroupStreams>& streams) {
  if (options().raises) refuseRecording(callers, "the group is in mode raise", kOutsideOfCapture);
  if (openBatch()) refuseRecording(callers, "the call is part of a batch", kOutsideOfCapture);
  throwIfError(group().usable());
  std::lock_guard lock(streamsMutex_);
  if (RecordedCalls* const calls = recordedCalls()) {
    if (calls->stream().device() == callers.device()) return *calls;
    refuseRecording(callers,
                    "graphs of " + calls->stream().device().str() + " have calls of the group",
                    "Use one device for each group");
  }
  auto calls = RecordedCalls::make(group(), streams,
                                   {.memoryLimit = options().streams.graphMemory,
                                    .limit = effective(c10d::kUnsetTimeout),
                                    .isIdle = [this] { return isIdle(); }});
  if (!calls.ok()) {
    refuseRecording(callers, "the call goes through host memory: " + calls.error().message,
                    kOutsideOfCapture);
  }
  use(std::move(*calls));
  return *recordedCalls();
}

std::shared_ptr<Staging> DeviceBackend::stagingFor(at::TensorList tensors,
                                                   std::chrono::milliseconds timeout) {
  const at::Tensor* const first = firstDefined(tensors);
  return first && isOfDevice(*first) ? stagingOn(first->device(), timeout) : nullptr;
}

std::shared_ptr<MessageStaging> DeviceBackend::messageStagingFor(at::TensorList tensors, int peer,
                                                                 bool isSend) {
  const at::Tensor* const first = firstDefined(tensors);
  if (!first || !isOfDevice(*first)) return nullptr;
  auto staging = std::make_shared<MessageStaging>(
      streamsOn(first->device()), currentStream(first->device()), effective(c10d::kUnsetTimeout));
  staging->preferDevice([this, peer, isSend](const at::Tensor& tensor) {
    return peerMessages_.find(group(), tensor, peer, isSend);
  });
  return staging;
}

// If the group is over, wait() has to raise that: no later call of the program may come.
DeviceWork::Waiting DeviceBackend::waiting(bool onHost) {
  return {.unseen = unseen_,
          .earlier = unseen_->first(),
          .onHost = onHost || !group().usable().ok(),
          .blocks = options().blockingWait,
          .limit = effective(c10d::kUnsetTimeout)};
}

std::shared_ptr<PeerSharing> DeviceBackend::peerSharing(const c10::Device& device) {
  refuseInForkedChild();
  std::lock_guard lock(sharingMutex_);
  if (sharing_) return sharing_;
  const auto timeout = effective(c10d::kUnsetTimeout);
  const auto makeControl = [&](std::function<void(const GroupView&)> onView) {
    return makeGroup("symmetric", 0, 0, false, Deadline::after(timeout), std::move(onView));
  };
  sharing_ = orThrow(PeerSharing::make(makeControl, acceleratorOf(device.type()),
                                       {.device = device.index(), .timeout = timeout}));
  started_ = sharing_.get();
  return sharing_;
}

PeerRoute& DeviceBackend::route() {
  std::lock_guard lock(streamsMutex_);
  if (!route_) {
    const auto timeout = effective(c10d::kUnsetTimeout);
    auto makeControl = [this, timeout](std::function<void(const GroupView&)> onView) {
      return makeGroup("peers", 0, 0, false, Deadline::after(timeout), std::move(onView));
    };
    route_ = std::make_unique<PeerRoute>(std::move(makeControl),
                                         PeerRoute::Settings{.name = options().groupName,
                                                             .bytes = options().streams.peerBytes,
                                                             .table = options().streams.peerTable,
                                                             .blocks = options().blockingWait,
                                                             .capacity = options().capacity,
                                                             .timeout = timeout,
                                                             .unseen = unseen_,
                                                             .onLoss = showLoss()});
  }
  return *route_;
}

template <typename Make>
DeviceBackend::WorkPtr DeviceBackend::byKernel(std::chrono::milliseconds timeout, Make&& make) {
  if (!options().streams.peerBytes || options().raises || openBatch()) return nullptr;
  const Deadline deadline = Deadline::after(effective(timeout));
  const PeerCalls::Call call = make(PeerCalls(rank_, size_, deadline));
  if (!call || !isOfDevice(call->first())) return nullptr;
  const at::Tensor& first = call->first();
  const auto isAlike = [&](const at::Tensor& tensor) {
    return checkDense(tensor, "a tensor").ok() && tensor.device() == first.device() &&
           tensor.scalar_type() == first.scalar_type();
  };
  if (!std::ranges::all_of(call->inputs, isAlike) || !std::ranges::all_of(call->outputs, isAlike))
    return nullptr;
  return route().run(rank_, streamsOn(first.device()), *call, deadline);
}

DeviceBackend::WorkPtr DeviceBackend::deviceWork(const std::shared_ptr<Staging>& staging,
                                                 Tensors outputs, WorkPtr host, bool onHost) {
  DeviceWork::Waiting ending{.onHost = true, .limit = effective(c10d::kUnsetTimeout)};
  if (const auto batch = openBatch()) {
    batch->stagings.push_back(staging);
    batch->outputs.insert(batch->outputs.end(), outputs.begin(), outputs.end());
    batch->waitsOnHost |= onHost;
    if (!host) return nullptr;  // a call of a batch, which raises at the batch's end
  } else {
    ending = waiting(onHost);  // else the batch's work is the one that is waited for
  }
  const c10d::OpType type = host->retrieveOpType();
  return c10::make_intrusive<DeviceWork>(rank_, type, std::move(host),
                                         std::vector<std::shared_ptr<Staging>>{staging},
                                         std::move(outputs), std::move(ending));
}

// A later call raises its error.
void DeviceBackend::noteReplay(UnseenErrors& unseen, WorkPtr host) {
  if (host->isCompleted() && host->isSuccess()) return;
  (void)unseen.first();  // forgets operations that have ended
  unseen.add(std::move(host), std::make_shared<std::atomic<bool>>(false));
}

template <typename Call>
DeviceBackend::WorkPtr DeviceBackend::staged(const std::shared_ptr<Staging>& staging,
                                             Tensors outputs, Call&& call, bool onHost) {
  WorkPtr host;
  {
    const Staging::Scope scope(staging);
    host = call();
  }
  if (staging->mode() == Staging::Mode::kRecords) {
    const auto graph = std::static_pointer_cast<GraphStaging>(staging);
    recordedCalls()->keep(graph, [unseen = unseen_, call = std::forward<Call>(call)](
                                     std::shared_ptr<Staging> replay) mutable {
      const Staging::Scope scope(std::move(replay));
      noteReplay(*unseen, call());
    });
    return c10::make_intrusive<RecordedWork>(rank_, host->retrieveOpType(), graph->stream(),
                                             std::move(outputs));
  }
  return deviceWork(staging, std::move(outputs), std::move(host), onHost);
}

DeviceBackend::WorkPtr DeviceBackend::allreduce(Tensors& tensors,
                                                const c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && isOfDevice(tensors[0]) && tensors[0].layout() == at::kSparse)
    return allreduceSparse(tensors[0], opts);
  if (auto work = byKernel(opts.timeout,
                           [&](const PeerCalls& calls) { return calls.allreduce(tensors, opts); }))
    return work;
  const auto staging = stagingFor(tensors, opts.timeout);
  if (!staging) return MooncakeBackend::allreduce(tensors, opts);
  checkFactor(*staging, opts.reduceOp);
  Tensors host;
  for (const at::Tensor& tensor : tensors)
    host.push_back(staging->inOut(tensor, "the tensor of all_reduce"));
  if (host.size() == 1) feedReduction(*staging, opts.reduceOp, host[0]);
  return staged(staging, tensors,
                [this, host, opts]() mutable { return MooncakeBackend::allreduce(host, opts); });
}

DeviceBackend::WorkPtr DeviceBackend::allreduceSparse(const at::Tensor& tensor,
                                                      const c10d::AllreduceOptions& opts) {
  const c10::Device device = tensor.device();
  const auto streams = streamsOn(device);
  const auto staging = std::make_shared<SparseStaging>(
      streams, streams->messages(currentStream(device)), effective(opts.timeout));
  staging->onFailure([this](const Error& why) { group().fail(why); });
  Tensors host{staging->sparse(tensor, "the sparse tensor of all_reduce")};
  return staged(staging, {tensor},
                [this, host, opts]() mutable { return MooncakeBackend::allreduce(host, opts); });
}

DeviceBackend::WorkPtr DeviceBackend::broadcast(Tensors& tensors,
                                                const c10d::BroadcastOptions& opts) {
  if (auto work = byKernel(opts.timeout,
                           [&](const PeerCalls& calls) { return calls.broadcast(tensors, opts); }))
    return work;
  const auto staging = stagingFor(tensors, opts.timeout);
  if (!staging) return MooncakeBackend::broadcast(tensors, opts);
  constexpr const char* kWhat = "the tensor of broadcast";
  Tensors host =
      opts.rootRank == rank_ ? inputs(*staging, tensors, kWhat) : outputs(*staging, tensors, kWhat);
  if (host.size() == 1) feedPieces(*staging, host[0]);
  return staged(staging, tensors,
                [this, host, opts]() mutable { return MooncakeBackend::broadcast(host, opts); });
}

DeviceBackend::WorkPtr DeviceBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  if (auto work = byKernel(opts.timeout,
                           [&](const PeerCalls& calls) { return calls.reduce(tensors, opts); }))
    return work;
  const auto staging = stagingFor(tensors, opts.timeout);
  if (!staging) return MooncakeBackend::reduce(tensors, opts);
  checkFactor(*staging, opts.reduceOp);
  constexpr const char* kWhat = "the tensor of reduce";
  Tensors host;
  for (const at::Tensor& tensor : tensors) {
    host.push_back(opts.rootRank == rank_ ? staging->inOut(tensor, kWhat)
                                          : staging->input(tensor, kWhat));
  }
  if (host.size() == 1) feedReduction(*staging, opts.reduceOp, host[0]);
  return staged(staging, tensors,
                [this, host, opts]() mutable { return MooncakeBackend::reduce(host, opts); });
}

DeviceBackend::WorkPtr DeviceBackend::allgather(std::vector<Tensors>& outs, Tensors& ins,
                                                const c10d::AllgatherOptions& opts) {
  if (auto work = byKernel(opts.timeout,
                           [&](const PeerCalls& calls) { return calls.allgather(outs, ins); }))
    return work;
  const auto staging = stagingFor(ins, opts.timeout);
  if (!staging) return MooncakeBackend::allgather(outs, ins, opts);
  Tensors hostIn = inputs(*staging, ins, "the input of all_gather");
  std::vector<Tensors> hostOut = outputs(*staging, outs, "an output of all_gather");
  if (hostIn.size() == 1 && hostOut.size() == 1 && areAlike(hostOut[0]))
    feedPieces(*staging, hostIn[0]);
  return staged(staging, flat(outs), [this, hostOut, hostIn, opts]() mutable {
    return MooncakeBackend::allgather(hostOut, hostIn, opts);
  });
}

DeviceBackend::WorkPtr DeviceBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::AllgatherOptions& opts) {
  if (auto work = byKernel(
          opts.timeout, [&](const PeerCalls& calls) { return calls.allgatherBase(output, input); }))
    return work;
  const auto staging = stagingFor(input, opts.timeout);
  if (!staging) return MooncakeBackend::_allgather_base(output, input, opts);
  at::Tensor hostIn = staging->input(input, "the input of all_gather_into_tensor");
  at::Tensor hostOut = staging->output(output, "the output of all_gather_into_tensor");
  feedPieces(*staging, hostIn);
  return staged(staging, {output}, [this, hostOut, hostIn, opts]() mutable {
    return MooncakeBackend::_allgather_base(hostOut, hostIn, opts);
  });
}

DeviceBackend::WorkPtr DeviceBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                           const c10d::ReduceScatterOptions& opts) {
  if (auto work = byKernel(opts.timeout, [&](const PeerCalls& calls) {
        return calls.reduceScatterBase(output, input, opts);
      }))
    return work;
  const auto staging = stagingFor(input, opts.timeout);
  if (!staging) return MooncakeBackend::_reduce_scatter_base(output, input, opts);
  checkFactor(*staging, opts.reduceOp);
  at::Tensor hostIn = staging->input(input, "the input of reduce_scatter_tensor");
  at::Tensor hostOut = staging->output(output, "the output of reduce_scatter_tensor");
  if (hostIn.numel() == hostOut.numel() * size_)
    feedReduction(*staging, opts.reduceOp, hostOut, size_t(size_), size_t(size_));
  return staged(staging, {output}, [this, hostOut, hostIn, opts]() mutable {
    return MooncakeBackend::_reduce_scatter_base(hostOut, hostIn, opts);
  });
}

DeviceBackend::WorkPtr DeviceBackend::alltoall(Tensors& outs, Tensors& ins,
                                               const c10d::AllToAllOptions& opts) {
  if (auto work =
          byKernel(opts.timeout, [&](const PeerCalls& calls) { return calls.alltoall(outs, ins); }))
    return work;
  const auto staging = stagingFor(ins, opts.timeout);
  if (!staging) return MooncakeBackend::alltoall(outs, ins, opts);
  Tensors hostIn = inputs(*staging, ins, "an input of all_to_all");
  std::vector<Tensors> hostOut =
      outputs(*staging, std::vector<Tensors>{outs}, "an output of all_to_all");
  feedParts(*staging, hostIn);
  return staged(staging, outs, [this, hostOut, hostIn, opts]() mutable {
    return MooncakeBackend::alltoall(hostOut[0], hostIn, opts);
  });
}

DeviceBackend::WorkPtr DeviceBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                    std::vector<int64_t>& outputSplits,
                                                    std::vector<int64_t>& inputSplits,
                                                    const c10d::AllToAllOptions& opts) {
  if (auto work = byKernel(opts.timeout, [&](const PeerCalls& calls) {
        return calls.alltoallBase(output, input, outputSplits, inputSplits);
      }))
    return work;
  const auto staging = stagingFor(input, opts.timeout);
  if (!staging)
    return MooncakeBackend::alltoall_base(output, input, outputSplits, inputSplits, opts);
  at::Tensor hostIn = staging->input(input, "the input of all_to_all_single");
  at::Tensor hostOut = staging->output(output, "the output of all_to_all_single");
  feedParts(*staging, {hostIn}, elementsPerRank(hostIn, inputSplits, size_, "input"));
  return staged(
      staging, {output}, [this, hostOut, hostIn, outputSplits, inputSplits, opts]() mutable {
        return MooncakeBackend::alltoall_base(hostOut, hostIn, outputSplits, inputSplits, opts);
      });
}

DeviceBackend::WorkPtr DeviceBackend::barrier(const c10d::BarrierOptions& opts) {
  std::optional<c10::Device> device = opts.device;
  if (!device || device->is_cpu()) {  // torch names the CPU for a group of several device types
    std::lock_guard lock(streamsMutex_);
    device = lastDevice_;
  }
  if (!device || device->is_cpu()) return MooncakeBackend::barrier(opts);
  if (!device->has_index()) device = c10::impl::VirtualGuardImpl(device->type()).getDevice();
  refuseCapture(currentStream(*device), "a barrier waits on the host");
  return staged(
      stagingOn(*device, opts.timeout), {}, [this, opts] { return MooncakeBackend::barrier(opts); },
      /*onHost=*/true);
}

DeviceBackend::WorkPtr DeviceBackend::gather(std::vector<Tensors>& outs, Tensors& ins,
                                             const c10d::GatherOptions& opts) {
  if (auto work = byKernel(opts.timeout,
                           [&](const PeerCalls& calls) { return calls.gather(outs, ins, opts); }))
    return work;
  const auto staging = stagingFor(ins, opts.timeout);
  if (!staging) return MooncakeBackend::gather(outs, ins, opts);
  Tensors hostIn = inputs(*staging, ins, "the input of gather");
  std::vector<Tensors> hostOut = outputs(*staging, outs, "an output of gather");
  if (hostIn.size() == 1) feedPieces(*staging, hostIn[0]);
  return staged(staging, flat(outs), [this, hostOut, hostIn, opts]() mutable {
    return MooncakeBackend::gather(hostOut, hostIn, opts);
  });
}

DeviceBackend::WorkPtr DeviceBackend::scatter(Tensors& outs, std::vector<Tensors>& ins,
                                              const c10d::ScatterOptions& opts) {
  if (auto work = byKernel(opts.timeout,
                           [&](const PeerCalls& calls) { return calls.scatter(outs, ins, opts); }))
    return work;
  const auto staging = stagingFor(outs, opts.timeout);
  if (!staging) return MooncakeBackend::scatter(outs, ins, opts);
  std::vector<Tensors> hostIn = inputs(*staging, ins, "an input of scatter");
  Tensors hostOut = outputs(*staging, outs, "the output of scatter");
  if (hostOut.size() == 1) feedPieces(*staging, hostOut[0], size_t(size_));
  return staged(staging, outs, [this, hostOut, hostIn, opts]() mutable {
    return MooncakeBackend::scatter(hostOut, hostIn, opts);
  });
}

DeviceBackend::WorkPtr DeviceBackend::reduce_scatter(Tensors& outs, std::vector<Tensors>& ins,
                                                     const c10d::ReduceScatterOptions& opts) {
  if (auto work = byKernel(opts.timeout, [&](const PeerCalls& calls) {
        return calls.reduceScatter(outs, ins, opts);
      }))
    return work;
  const auto staging = stagingFor(outs, opts.timeout);
  if (!staging) return MooncakeBackend::reduce_scatter(outs, ins, opts);
  checkFactor(*staging, opts.reduceOp);
  std::vector<Tensors> hostIn = inputs(*staging, ins, "an input of reduce_scatter");
  Tensors hostOut = outputs(*staging, outs, "the output of reduce_scatter");
  if (hostOut.size() == 1 && hostIn.size() == 1 && areAlike(hostIn[0]))
    feedReduction(*staging, opts.reduceOp, hostOut[0], size_t(size_));
  return staged(staging, outs, [this, hostOut, hostIn, opts]() mutable {
    return MooncakeBackend::reduce_scatter(hostOut, hostIn, opts);
  });
}

DeviceBackend::WorkPtr DeviceBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return withinBatch([&]() -> WorkPtr {
    const auto staging = stagingFor(tensors, opts.timeout);
    if (!staging) return MooncakeBackend::allreduce_coalesced(tensors, opts);
    checkFactor(*staging, opts.reduceOp);
    Tensors host;
    for (const at::Tensor& tensor : tensors)
      host.push_back(staging->inOut(tensor, "a tensor of all_reduce_coalesced"));
    return staged(staging, tensors, [this, host, opts]() mutable {
      return MooncakeBackend::allreduce_coalesced(host, opts);
    });
  });
}

DeviceBackend::WorkPtr DeviceBackend::allgather_coalesced(std::vector<Tensors>& outs, Tensors& ins,
                                                          const c10d::AllgatherOptions& opts) {
  const auto staging = stagingFor(ins, opts.timeout);
  if (!staging) return MooncakeBackend::allgather_coalesced(outs, ins, opts);
  Tensors hostIn = inputs(*staging, ins, "an input of all_gather_coalesced");
  std::vector<Tensors> hostOut = outputs(*staging, outs, "an output of all_gather_coalesced");
  return staged(staging, flat(outs), [this, hostOut, hostIn, opts]() mutable {
    return MooncakeBackend::allgather_coalesced(hostOut, hostIn, opts);
  });
}

DeviceBackend::WorkPtr DeviceBackend::allgather_into_tensor_coalesced(
    Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& opts) {
  return withinBatch([&]() -> WorkPtr {
    const auto staging = stagingFor(ins, opts.timeout);
    if (!staging) return MooncakeBackend::allgather_into_tensor_coalesced(outs, ins, opts);
    Tensors hostIn = inputs(*staging, ins, "an input of all_gather_into_tensor_coalesced");
    std::vector<Tensors> hostOut = outputs(*staging, std::vector<Tensors>{outs},
                                           "an output of all_gather_into_tensor_coalesced");
    return staged(staging, outs, [this, hostOut, hostIn, opts]() mutable {
      return MooncakeBackend::allgather_into_tensor_coalesced(hostOut[0], hostIn, opts);
    });
  });
}

DeviceBackend::WorkPtr DeviceBackend::reduce_scatter_tensor_coalesced(
    Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& opts) {
  return withinBatch([&]() -> WorkPtr {
    const auto staging = stagingFor(ins, opts.timeout);
    if (!staging) return MooncakeBackend::reduce_scatter_tensor_coalesced(outs, ins, opts);
    checkFactor(*staging, opts.reduceOp);
    Tensors hostIn = inputs(*staging, ins, "an input of reduce_scatter_tensor_coalesced");
    std::vector<Tensors> hostOut = outputs(*staging, std::vector<Tensors>{outs},
                                           "an output of reduce_scatter_tensor_coalesced");
    return staged(staging, outs, [this, hostOut, hostIn, opts]() mutable {
      return MooncakeBackend::reduce_scatter_tensor_coalesced(hostOut[0], hostIn, opts);
    });
  });
}

DeviceBackend::WorkPtr DeviceBackend::endCoalescing() {
  const auto batch = openBatch();
  WorkPtr host = MooncakeBackend::endCoalescing();
  if (!batch || batch->stagings.empty()) return host;
  const auto& calls = dynamic_cast<BatchWork&>(*host).works();
  const bool onHost = batch->waitsOnHost || calls.size() != batch->stagings.size();
  return c10::make_intrusive<DeviceWork>(rank_, c10d::OpType::COALESCED, std::move(host),
                                         std::move(batch->stagings), std::move(batch->outputs),
                                         waiting(onHost));
}

DeviceBackend::WorkPtr DeviceBackend::send(Tensors& tensors, int to, int tag) {
  return withinBatch([&]() -> WorkPtr {
    const auto staging = messageStagingFor(tensors, to, /*isSend=*/true);
    if (!staging) return MooncakeBackend::send(tensors, to, tag);
    Tensors host = inputs(*staging, tensors, "the tensor of send");
    checkMessage(c10d::OpType::SEND, host, to, tag);
    staging->mark();
    return staged(staging, tensors,
                  [this, host, to, tag]() mutable { return MooncakeBackend::send(host, to, tag); });
  });
}

template <typename Receive>
DeviceBackend::WorkPtr DeviceBackend::receive(Tensors& tensors, int from, bool onHost,
                                              Receive&& receive) {
  return withinBatch([&]() -> WorkPtr {
    const auto staging = messageStagingFor(tensors, from, /*isSend=*/false);
    if (!staging) return receive(tensors);
    Tensors host = outputs(*staging, tensors, "the tensor of recv");
    staging->mark();
    return staged(
        staging, tensors, [receive, host]() mutable { return receive(host); }, onHost);
  });
}

DeviceBackend::WorkPtr DeviceBackend::recv(Tensors& tensors, int from, int tag) {
  return receive(tensors, from, /*onHost=*/false,
                 [=, this](Tensors& host) { return MooncakeBackend::recv(host, from, tag); });
}

// The caller asks for the sender after wait().
DeviceBackend::WorkPtr DeviceBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive(tensors, PointToPoint::kAnySource, /*onHost=*/true,
                 [=, this](Tensors& host) { return MooncakeBackend::recvAnysource(host, tag); });
}

}  // namespace mooncake
