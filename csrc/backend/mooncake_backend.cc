#include "backend/mooncake_backend.h"

#include <utility>

#include "backend/arena_tensors.h"
#include "backend/arguments.h"
#include "backend/child_options.h"
#include "backend/device/device_calls.h"
#include "backend/device/device_ranks.h"
#include "backend/errors.h"
#include "backend/torch_window.h"

namespace mooncake {

MooncakeBackend::MooncakeBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                 BackendOptions options, const MooncakeBackend* world)
    : C10dVerbs(rank, size),
      group_(store, rank, size, options, makeActiveRanks(options.activeRanks, size),
             world ? &world->group_ : nullptr),
      devices_(std::make_unique<DeviceCalls>(group_, host_, messages_)),
      leaving_(group_, *devices_) {
  group_.activeRanks()->push();
}

MooncakeBackend::~MooncakeBackend() { leaving_.close(); }

c10::intrusive_ptr<c10d::Backend::Options> MooncakeBackend::getBackendOptions() {
  auto options = c10::make_intrusive<Options>(group_.options().name, group_.options().timeout);
  nameGroup(*options, group_.options());
  return options;
}

c10d::ErrorType MooncakeBackend::getError() {
  switch (facts_.usable().code()) {
    case ErrorCode::kOk:
      return c10d::ErrorType::SUCCESS;
    case ErrorCode::kTimeout:
      return c10d::ErrorType::TIMEOUT;
    case ErrorCode::kEvicted:
    case ErrorCode::kMinority:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

void MooncakeBackend::shutdown() {
  leaving_.shutdown();
  devices_->left();
}

void MooncakeBackend::abort() {
  const Error why{ErrorCode::kAborted, "the process group was aborted"};
  devices_->fail(why);
  group_.refuseInForkedChild();
  abortHooks_.run();
  group_.group()->fail(why);
  group_.messages()->messages().abort(why);
}

#ifdef MOONCAKE_HAS_COMPLETION_HOOKS
void MooncakeBackend::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  group_.hooks()->add(id, [hook = std::move(hook)](uint64_t key) { hook({.completionKey = key}); });
}
#endif

#ifdef C10D_BACKEND_HAS_WINDOW
c10::intrusive_ptr<c10d::Window> MooncakeBackend::new_window(
    const std::optional<at::Tensor>& tensor) {
  group_.refuseInForkedChild();
  throwIfError(group_.group()->usable());
  auto window = c10::make_intrusive<TorchWindow>(*this);
  if (tensor) window->tensor_register(*tensor, true);
  return window;
}
#endif

at::Tensor MooncakeBackend::allocateTensor(long size, at::TensorOptions options) {
  group_.refuseInForkedChild();
  throwIfError(group_.group()->usable());
  return tensorInArena(*group_.job().engine(), size, options);
}

MooncakeBackend::WorkPtr MooncakeBackend::carryOut(Collective call) {
  call.timeout = group_.effective(call.timeout);
  auto work = devices_->carryOut(call);
  return work ? *work : host_.carryOut(call);
}

MooncakeBackend::WorkPtr MooncakeBackend::barrier(const c10d::BarrierOptions& opts) {
  auto work = devices_->barrier(opts);
  return work ? *work : C10dVerbs::barrier(opts);
}

void MooncakeBackend::startCoalescing() {
  group_.refuseInForkedChild();
  group_.batches().begin();
}

MooncakeBackend::WorkPtr MooncakeBackend::endCoalescing() {
  const auto batch = group_.batches().current();
  WorkPtr host = messages_.endBatch();
  return batch ? devices_->ofBatch(*batch, std::move(host)) : host;
}

MooncakeBackend::WorkPtr MooncakeBackend::post(c10d::OpType type,
                                               const std::vector<at::Tensor>& tensors, int peer,
                                               int tag) {
  return batches().within([&] {
    auto work = devices_->post(type, tensors, peer, tag);
    return work ? *work : messages_.post(type, tensors, peer, tag);
  });
}

}  // namespace mooncake
