#include "backend/device/peer_route.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include "backend/arguments.h"
#include "backend/device/accelerator_of.h"
#include "backend/device/keep_until_passed.h"
#include "backend/device/kernel_work.h"
#include "backend/device/recorded_work.h"
#include "backend/errors.h"

namespace mooncake {
namespace {

// The tensor itself, if kernels can use it as it is, or a copy on the current stream.
at::Tensor plain(const at::Tensor& tensor) {
  return tensor.resolve_conj().resolve_neg().contiguous();
}

// Whether a gathered input shares memory with outputs, other than the place that gets this data. Then
// a piece of a result may overwrite a later piece of the input.
bool overlapElsewhere(const at::Tensor& input, const std::vector<at::Tensor>& outputs, int rank) {
  const bool isOne = outputs.size() == 1;
  const at::Tensor& own = outputs[isOne ? 0 : size_t(rank)];
  const void* const place =
      static_cast<std::byte*>(own.data_ptr()) + (isOne ? size_t(rank) * input.nbytes() : 0);
  return input.data_ptr() != place && std::ranges::any_of(outputs, [&](const at::Tensor& output) {
           return output.storage().is_alias_of(input.storage());
         });
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const ConstSpan first = bytesOf(a), second = bytesOf(b);
  return !first.empty() && !second.empty() && first.data() < second.data() + second.size() &&
         second.data() < first.data() + first.size();
}

}  // namespace

PeerRoute::PeerRoute(MakeGroup makeGroup, Settings settings)
    : makeGroup_(std::move(makeGroup)),
      settings_(std::move(settings)),
      calls_(std::make_shared<KernelCalls>(KernelCalls::Names{
          .log = "group '" + settings_.name + "'",
          .owner = "the group",
          .variable = "MOONCAKE_PEER_BYTES",
          .setUp = "Call all_reduce of the group on a tensor of the device before the capture",
          .oneDevice = "Use one device for each group, or set MOONCAKE_PEER_BYTES=0"})) {}

void PeerRoute::decide(const std::shared_ptr<GroupStreams>& streams, Deadline deadline) {
  KernelControl control = KernelControl::make(makeGroup_);
  auto [accelerator, stream] = calls_->begin(streams);
  auto peers = calls_->end(PeerCollectives::make(
      std::move(control.group), std::move(control.view), std::move(accelerator), stream,
      {settings_.bytes, settings_.table, settings_.timeout, settings_.onLoss}, deadline));
  if (!peers) return;
  // The streams are not lent to other users before the kernels have ended.
  peers_ = std::shared_ptr<PeerCollectives>(
      peers.release(), [calls = calls_](PeerCollectives* made) { delete made; });
  started_ = peers_.get();
}

c10::intrusive_ptr<c10d::Work> PeerRoute::run(int rank,
                                              const std::shared_ptr<GroupStreams>& streams,
                                              const Collective& call, const KernelRun& kernel,
                                              Deadline deadline) {
  const c10::Device device = streams->collectives().device();
  const c10::Stream callers = currentOn(device);
  const bool isRecorded = isCapturing(callers);
  const c10::DeviceGuard on(device);
  Lock lock(mutex_);
  if (!calls_->isDecided()) {
    if (isRecorded) calls_->refuseUndecided(callers);
    decide(streams, deadline);
  }
  if (!peers_) return nullptr;
  if (isRecorded) {
    checkRecording(callers, call, kernel);
  } else if (!peers_->takes(size_t(kernel.parts))) {
    return nullptr;
  }
  calls_->checkDevice(device);
  const uint64_t number = calls_->submit(callers, isRecorded, [&](const c10::Stream& stream) {
    mutex_.assertHeld();
    return enqueue(rank, call, kernel, stream, deadline);
  });
  if (isRecorded) {
    return c10::make_intrusive<RecordedWork>(rank, call.kind->type, calls_->stream(isRecorded),
                                             call.results());
  }
  const auto work = c10::make_intrusive<KernelWork>(
      rank, call.kind->type, settings_.capacity, peers_,
      KernelWork::Operation{number, kernel.root, kernel.hasSplits, settings_.blocks,
                            settings_.unseen->first()},
      streams, call.results());
  if (kernel.root >= 0 || kernel.hasSplits) settings_.unseen->add(work, work->isRaised());
  return work;
}

void PeerRoute::checkRecording(const c10::Stream& callers, const Collective& call,
                               const KernelRun& kernel) const {
  if (!peers_->takes(size_t(kernel.parts)) || hasPieces(call, kernel)) {
    const size_t bytes = size_t(kernel.count) * size_t(kernel.parts) * call.first().itemsize();
    refuseRecording(callers,
                    "its input of " + std::to_string(bytes) +
                        " bytes is larger than MOONCAKE_PEER_BYTES (" +
                        std::to_string(settings_.bytes) + ")",
                    "Raise that on all ranks, or call it outside of the capture");
  }
  if (call.isPremultiplied() && isFactorOnDevice(*call.op)) {
    refuseRecording(callers, "the factor of PREMUL_SUM is on a device, and the host reads it",
                    "Give a number, or a tensor of the CPU");
  }
  throwIfError(peers_->guard().usable());
}

// Enqueues the call's kernel, and copies where the kernel cannot take a tensor as it is. A copy of
// an output has its contents, which stay if the operation has no result. Returns the call's number.
uint64_t PeerRoute::enqueue(int rank, const Collective& call, const KernelRun& kernel,
                            const c10::Stream& stream, Deadline deadline) const {
  const c10::StreamGuard current(stream);
  const at::NoGradGuard withoutGradients;
  const Tensors given = call.read(), targets = call.written();
  Tensors inputs, outputs;
  PeerCollectives::Tensors tensors{.count = size_t(kernel.count),
                                   .dtype = typeOf(call.first(), "a call")};
  for (const at::Tensor& tensor : given) inputs.push_back(plain(tensor.detach()));
  for (const at::Tensor& tensor : targets) {
    const bool isInPlace = given.size() == 1 && tensor.is_same(given[0]);
    outputs.push_back(isInPlace ? inputs[0] : plain(tensor.detach()));
  }
  if (call.isPremultiplied()) {
    for (at::Tensor& input : inputs)
      input = input.clone().mul_(factorOf(input, *call.op, call.kind->name));
  }
  // If ranks are lost, the kernel reads the inputs again when it has written to outputs.
  for (at::Tensor& input : inputs) {
    const auto isShared = [&](const at::Tensor& output) { return overlap(input, output); };
    if (kernel.hasSplits && std::ranges::any_of(outputs, isShared)) input = input.clone();
  }
  at::Tensor scratch;
  if (!outputs.empty() && hasPieces(call, kernel)) {
    const bool isGathered = outputs.size() > 1 || outputs[0].numel() != kernel.count;
    if (!isGathered) {
      scratch = at::empty_like(outputs[0]);
      tensors.scratch = scratch.data_ptr();
    } else if (overlapElsewhere(inputs[0], outputs, rank)) {
      inputs[0] = inputs[0].clone();
    }
  }
  for (const at::Tensor& input : inputs) tensors.inputs.push_back(input.data_ptr());
  for (const at::Tensor& output : outputs) tensors.outputs.push_back(output.data_ptr());
  for (const auto& list : {given, targets, inputs, outputs}) keepUntilPassed(list, stream);
  const uint64_t number = orThrow(kernel.launch(*peers_, tensors, deadline));
  for (size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor target = targets[i].detach();
    if (outputs[i].data_ptr() == target.data_ptr()) continue;
    const PlainWrites plainly(targets[i]);
    target.copy_(outputs[i]);
  }
  return number;
}

Status PeerRoute::usable() const {
  const PeerCollectives* const peers = started_;
  return peers ? peers->guard().usable() : Status();
}

void PeerRoute::fail(const Error& why) {
  if (PeerCollectives* const peers = started_) peers->guard().fail(why);
}

void PeerRoute::drain(Deadline deadline) const {
  Lock lock(mutex_);
  calls_->drain(deadline);
}

}  // namespace mooncake
