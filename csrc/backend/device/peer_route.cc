#include "backend/device/peer_route.h"

#include <utility>

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
  const c10::Stream& stream = streams->collectives();
  if (isDecided_) return peers_ != nullptr;
  isDecided_ = true;
  device_ = stream.device();
  auto feed = std::make_shared<ViewFeed>();
  auto control = makeGroup_([feed](const GroupView& view) { feed->show(view); });
  const auto accelerator = acceleratorOf(stream.device_type());
  const DeviceStream native = accelerator.ok() ? OwnStream::nativeOf(stream) : DeviceStream{};
  Accelerator* const used = accelerator.ok() ? *accelerator : nullptr;
  auto peers =
      PeerCollectives::make(std::move(control), std::move(feed), used, native,
                            {.halfBytes = settings_.bytes, .timeout = settings_.timeout}, deadline);
  if (!peers.ok()) {
    log(LogLevel::kInfo, "group '" + settings_.name + "'",
        "tensors of devices go through host memory: ", peers.error().message);
    return false;
  }
  peers_ = std::move(*peers);
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
  const at::Tensor input = plain(call.input);
  const bool isInPlace = call.output.is_same(call.input);
  const at::Tensor output = isInPlace ? input
                            : call.output.is_contiguous()
                                ? call.output
                                : at::empty_like(call.output, at::MemoryFormat::Contiguous);
  const auto number = orThrow(call.launch(*peers_, {.input = input.data_ptr(),
                                                    .output = output.data_ptr(),
                                                    .count = size_t(call.count),
                                                    .dtype = typeOf(call.input, "a call")}));
  last_ = number;
  if (!output.is_same(call.output)) call.output.copy_(output);
  for (const at::Tensor& tensor : {call.input, call.output, input, output})
    keepUntilPassed(tensor, stream);
  return c10::make_intrusive<KernelWork>(rank, call.type, peers_, number, streams,
                                         std::vector<at::Tensor>{call.output}, settings_.blocks);
}

void PeerRoute::drain(Deadline deadline) const {
  std::lock_guard lock(mutex_);
  if (peers_) (void)peers_->guard().await(last_, deadline);
}

}  // namespace mooncake
