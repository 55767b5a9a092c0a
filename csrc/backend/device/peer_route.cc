#include "backend/device/peer_route.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "backend/arguments.h"
#include "backend/device/accelerator_of.h"
#include "backend/device/keep_until_passed.h"
#include "backend/device/kernel_work.h"
#include "backend/device/recorded_work.h"
#include "backend/errors.h"
#include "base/log.h"

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

bool PeerRoute::decide(const std::shared_ptr<GroupStreams>& streams, Deadline deadline) {
  if (isDecided_) return peers_ != nullptr;
  const c10::Stream& stream = streams->collectives();
  auto feed = std::make_shared<ViewFeed>();
  auto control = makeGroup_([feed](const GroupView& view) { feed->show(view); });
  isDecided_ = true;
  device_ = stream.device();
  Result<Accelerator*> accelerator = acceleratorOf(stream.device_type());
  // Without words, a staged call's copies may have to wait on the stream for the host's turn, behind
  // a kernel of a later call.
  if (accelerator.ok() && !streams->words())
    accelerator = Error{ErrorCode::kUnsupported, "its streams have no words"};
  const DeviceStream native = accelerator.ok() ? OwnStream::nativeOf(stream) : DeviceStream{};
  auto peers = PeerCollectives::make(
      std::move(control), std::move(feed), std::move(accelerator), native,
      {settings_.bytes, settings_.table, settings_.timeout, settings_.onLoss}, deadline);
  if (!peers.ok()) {
    log(LogLevel::kWarning, "group '" + settings_.name + "'",
        "no kernels, though MOONCAKE_PEER_BYTES asks for them: tensors of devices go through host "
        "memory: ",
        peers.error().message);
    return false;
  }
  // The stream is not lent to others before the kernels have ended.
  peers_ = std::shared_ptr<PeerCollectives>(peers->release(),
                                            [streams](PeerCollectives* made) { delete made; });
  started_ = peers_.get();
  return true;
}

c10::intrusive_ptr<c10d::Work> PeerRoute::run(int rank,
                                              const std::shared_ptr<GroupStreams>& streams,
                                              const Call& call, Deadline deadline) {
  const c10::Device device = streams->collectives().device();
  const c10::Stream callers = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const bool isRecorded = isCapturing(callers);
  const c10::DeviceGuard on(device);
  std::lock_guard lock(mutex_);
  if (isRecorded && isDecided_ && !peers_) return nullptr;
  if (isRecorded) {
    checkRecording(callers, call);
  } else if (!decide(streams, deadline) || !peers_->takes(size_t(call.parts))) {
    return nullptr;
  }
  if (device != *device_) {
    refuse("the group's kernels use memory of " + device_->str() + ", and the tensor is on " +
           device.str() + ". Use one device for each group, or set MOONCAKE_PEER_BYTES=0");
  }
  const c10::Stream& stream = isRecorded ? streams->recordings() : streams->collectives();
  std::optional<PeerQueue::Recording> recording;
  if (isRecorded)
    recording.emplace(peers_->queue(), OwnStream::nativeOf(stream),
                      !OwnStream::isCapturing(stream));
  c10::Event reached(device.type());
  reached.record(callers);
  reached.block(stream);
  if (!isRecorded) {
    const uint64_t number = enqueue(rank, call, stream);
    const auto work = c10::make_intrusive<KernelWork>(
        rank, call.type, settings_.capacity, peers_,
        KernelWork::Operation{number, call.root, call.hasSplits, settings_.blocks,
                              settings_.unseen->first()},
        streams, call.results);
    if (call.root >= 0 || call.hasSplits) settings_.unseen->add(work, work->isRaised());
    return work;
  }
  try {
    (void)enqueue(rank, call, stream);
  } catch (...) {
    // The stream has joined the capture, which cannot end without it.
    RecordedWork(rank, call.type, stream, {}).synchronize();
    throw;
  }
  return c10::make_intrusive<RecordedWork>(rank, call.type, stream, call.results);
}

void PeerRoute::checkRecording(const c10::Stream& callers, const Call& call) const {
  if (!isDecided_) {
    refuseRecording(callers, "the group has not set up its kernels yet",
                    "Call all_reduce of the group on a tensor of the device before the capture");
  }
  if (!peers_->takes(size_t(call.parts)) || hasPieces(call)) {
    const size_t bytes = size_t(call.count) * size_t(call.parts) * call.first().itemsize();
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
uint64_t PeerRoute::enqueue(int rank, const Call& call, const c10::Stream& stream) const {
  const c10::StreamGuard current(stream);
  const at::NoGradGuard withoutGradients;
  std::vector<at::Tensor> inputs, outputs;
  PeerCollectives::Tensors tensors{.count = size_t(call.count),
                                   .dtype = typeOf(call.first(), "a call")};
  for (const at::Tensor& tensor : call.inputs) inputs.push_back(plain(tensor.detach()));
  for (const at::Tensor& tensor : call.outputs) {
    const bool isInPlace = call.inputs.size() == 1 && tensor.is_same(call.inputs[0]);
    outputs.push_back(isInPlace ? inputs[0] : plain(tensor.detach()));
  }
  if (call.isPremultiplied()) {
    for (at::Tensor& input : inputs)
      input = input.clone().mul_(factorOf(input, *call.op, call.name));
  }
  // If ranks are lost, the kernel reads the inputs again when it has written to outputs.
  for (at::Tensor& input : inputs) {
    const auto isShared = [&](const at::Tensor& output) { return overlap(input, output); };
    if (call.hasSplits && std::ranges::any_of(outputs, isShared)) input = input.clone();
  }
  at::Tensor scratch;
  if (!outputs.empty() && hasPieces(call)) {
    const bool isGathered = outputs.size() > 1 || outputs[0].numel() != call.count;
    if (!isGathered) {
      scratch = at::empty_like(outputs[0]);
      tensors.scratch = scratch.data_ptr();
    } else if (overlapElsewhere(inputs[0], outputs, rank)) {
      inputs[0] = inputs[0].clone();
    }
  }
  for (const at::Tensor& input : inputs) tensors.inputs.push_back(input.data_ptr());
  for (const at::Tensor& output : outputs) tensors.outputs.push_back(output.data_ptr());
  for (const auto& list : {call.inputs, call.outputs, inputs, outputs})
    for (const at::Tensor& tensor : list) keepUntilPassed(tensor, stream);
  const uint64_t number = orThrow(call.launch(*peers_, tensors));
  for (size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor target = call.outputs[i].detach();
    if (outputs[i].data_ptr() == target.data_ptr()) continue;
    const PlainWrites plainly(call.outputs[i]);
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
  std::lock_guard lock(mutex_);
  if (peers_) peers_->queue().drain(deadline);
}

}  // namespace mooncake
