#include "backend/device/peer_route.h"

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
#include "backend/errors.h"
#include "base/log.h"

namespace mooncake {
namespace {

// The tensor itself, if kernels can use it as it is, or a copy on the current stream.
at::Tensor plain(const at::Tensor& tensor) {
  return tensor.resolve_conj().resolve_neg().contiguous();
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
  auto peers =
      PeerCollectives::make(std::move(control), std::move(feed), std::move(accelerator), native,
                            {.halfBytes = settings_.bytes, .timeout = settings_.timeout}, deadline);
  if (!peers.ok()) {
    log(LogLevel::kInfo, "group '" + settings_.name + "'",
        "tensors of devices go through host memory: ", peers.error().message);
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
  const c10::Stream& stream = streams->collectives();
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  const c10::Stream callers = guard.getStream(stream.device());
  refuseCapture(callers,
                "an operation between ranks cannot be recorded: its replays would have to be "
                "counted on the device");
  const c10::DeviceGuard on(stream.device());
  std::lock_guard lock(mutex_);
  if (!decide(streams, deadline) || !peers_->takes(call.input.nbytes())) return nullptr;
  if (stream.device() != *device_) {
    refuse("the group's kernels use memory of " + device_->str() + ", and the tensor is on " +
           stream.device().str() + ". Use one device for each group, or set MOONCAKE_PEER_BYTES=0");
  }
  c10::Event reached(stream.device_type());
  reached.record(callers);
  reached.block(stream);
  const c10::StreamGuard current(stream);
  const at::NoGradGuard withoutGradients;
  const at::Tensor target = call.output.detach();
  const at::Tensor input = plain(call.input.detach());
  const bool isInPlace = call.output.is_same(call.input);
  const bool isPlain = target.is_contiguous() && !target.is_conj() && !target.is_neg();
  const at::Tensor output = isInPlace ? input
                            : isPlain ? target
                                      : at::empty_like(target, at::MemoryFormat::Contiguous);
  for (const at::Tensor& tensor : {call.input, target, input, output})
    keepUntilPassed(tensor, stream);
  last_ = orThrow(call.launch(*peers_, {.input = input.data_ptr(),
                                        .output = output.data_ptr(),
                                        .count = size_t(call.count),
                                        .dtype = typeOf(call.input, "a call")}));
  if (output.data_ptr() != target.data_ptr()) {
    const PlainWrites plainly(call.output);
    target.copy_(output);
  }
  return c10::make_intrusive<KernelWork>(rank, call.type, peers_, last_, streams,
                                         std::vector<at::Tensor>{call.output}, settings_.blocks);
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
  if (peers_) (void)peers_->guard().await(last_, deadline);
}

}  // namespace mooncake
