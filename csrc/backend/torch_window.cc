#include "backend/torch_window.h"

#ifdef C10D_BACKEND_HAS_WINDOW

#include <utility>

#include "backend/arena_tensors.h"
#include "backend/arguments.h"

namespace mooncake {
namespace {

constexpr CollectiveKind kWindowCall{c10d::OpType::UNKNOWN, "a call of a window", nullptr};

RmaWindow::Given givenOf(const at::Tensor& tensor) {
  throwIfError(checkTensor(tensor, "the tensor of a window"));
  if (!tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg())
    refuse(
        "the tensor of a window must be contiguous: others put into its memory as it lies there");
  RmaWindow::Given given{.memory = bytesOf(tensor), .shape = tensor.sizes().vec()};
  if (given.shape.size() > RmaWindow::kMostDims) given.shape = {tensor.numel()};
  return given;
}

}  // namespace

TorchWindow::TorchWindow(MooncakeBackend& backend)
    : backend_(c10::intrusive_ptr<MooncakeBackend>::reclaim_copy(&backend)),
      messages_(backend.group().messages()),
      size_(backend.group().size()) {}

// A forked child leaks its members: a thread of the parent may hold their locks for ever.
TorchWindow::~TorchWindow() {
  if (forkGeneration_ != forkGeneration()) {
    new Registered(std::move(registered_));
    new std::shared_ptr<MessageDriver>(messages_);
  }
}

void TorchWindow::tensor_register(const at::Tensor& tensor, bool) {
  const auto group = backend("tensor_register");
  RmaWindow::Given given = givenOf(tensor);
  const DType dtype = orThrow(dtypeOf(tensor));
  {
    Lock lock(mutex_);
    if (registered_.window)
      refuse(
          "tensor_register: this window has a tensor; tensor_deregister() it, or make another "
          "window");
  }
  Registered made{tensor, nullptr};
  LiveGroup& ours = group->group();
  const auto run = [&made, &ours, given = std::move(given), dtype,
                    timeout = ours.effective(c10d::kUnsetTimeout)](Group& series,
                                                                   InputFeed*) -> Status {
    auto window = RmaWindow::open(series, ours.messages()->messages(), given, dtype,
                                  Deadline::after(timeout));
    if (!window.ok()) return window.error();
    made.window = std::move(*window);
    return {};
  };
  group->host().submit({.kind = &kWindowCall, .isAsync = false}, run)->wait(kNoTimeout);
  throwIfError(messages_->watch());
  Lock lock(mutex_);
  registered_ = std::move(made);
}

void TorchWindow::tensor_deregister() {
  const auto group = backend("tensor_deregister");
  const auto window = registered("tensor_deregister").window;
  LiveGroup& ours = group->group();
  const auto run = [window, timeout = ours.effective(c10d::kUnsetTimeout)](Group& series,
                                                                           InputFeed*) {
    return window->close(series, Deadline::after(timeout));
  };
  group->host().submit({.kind = &kWindowCall, .isAsync = false}, run)->wait(kNoTimeout);
  Registered ended;  // destroyed without the lock: a tensor's end may wait for Python's lock
  Lock lock(mutex_);
  std::swap(registered_, ended);
}

// `post` starts the message. It is passed the function to call when the message is done.
template <typename Post>
TorchWindow::WorkPtr TorchWindow::start(MooncakeBackend& group, bool async,
                                        std::shared_ptr<MessageMemory> memory, Post&& post) {
  LiveGroup& ours = group.group();
  const uint64_t key = ours.hooks()->newKey();
  const std::shared_ptr<Message> message = post(group.messages().tellingOf(key));
  auto work =
      c10::make_intrusive<MessageWork>(ours.rank(), ours.options().capacity, c10d::OpType::UNKNOWN,
                                       messages_, message, std::move(memory), Profile(), key);
  if (!async) {
    work->wait(kNoTimeout);
  } else if (!work->finished()) {
    if (const Status watched = messages_->watch(); !watched.ok()) {
      work->cancel(watched.error());
      throwError(watched.error());
    }
  }
  return work;
}

TorchWindow::WorkPtr TorchWindow::put(const at::Tensor& tensor, int64_t dstRank,
                                      int64_t targetOffsetNelems, bool asyncOp,
                                      const c10d::PutOptions& opts) {
  const auto group = backend("put");
  const int to = checkedRank("put", dstRank);
  const Registered there = registered("put");
  throwIfError(checkTensor(tensor, "the tensor of put"));
  if (tensor.scalar_type() != there.tensor.scalar_type()) {
    refuse(c10::str("put: the tensor is of type ", tensor.scalar_type(), ", the window's is ",
                    there.tensor.scalar_type()));
  }
  uint64_t offset = 0;
  if (targetOffsetNelems < 0 || __builtin_mul_overflow(uint64_t(targetOffsetNelems),
                                                       uint64_t(tensor.element_size()), &offset))
    refuse("put: an offset of " + std::to_string(targetOffsetNelems) + " elements");
  const auto source = group->messages().memoryOf(tensor);
  return start(*group, asyncOp, source, [&](PointToPoint::OnDone onDone) {
    return orThrow(there.window->put(source->bytes(), to, offset,
                                     group->group().deadline(opts.timeout), std::move(onDone),
                                     source));
  });
}

TorchWindow::WorkPtr TorchWindow::signal(int64_t peerRank, bool asyncOp,
                                         const c10d::SignalOptions& opts) {
  const auto group = backend("signal");
  const int to = checkedRank("signal", peerRank);
  const auto window = registered("signal").window;
  return start(*group, asyncOp, nullptr, [&](PointToPoint::OnDone onDone) {
    return orThrow(window->signal(to, group->group().deadline(opts.timeout), std::move(onDone)));
  });
}

TorchWindow::WorkPtr TorchWindow::wait_signal(int64_t peerRank, bool asyncOp,
                                              const c10d::WaitSignalOptions& opts) {
  const auto group = backend("wait_signal");
  const int from = checkedRank("wait_signal", peerRank);
  const auto window = registered("wait_signal").window;
  return start(*group, asyncOp, nullptr, [&](PointToPoint::OnDone onDone) {
    return window->awaitSignal(from, group->group().deadline(opts.timeout), std::move(onDone));
  });
}

at::Tensor TorchWindow::map_remote_tensor(int64_t rank) {
  const auto group = backend("map_remote_tensor");
  const int of = checkedRank("map_remote_tensor", rank);
  const auto [tensor, window] = registered("map_remote_tensor");
  if (of == group->getRank()) return tensor;
  if (window->mapped(of).data() == nullptr) {
    throwError({ErrorCode::kUnsupported,
                "map_remote_tensor: the tensor of rank " + std::to_string(of) +
                    " is not mapped here (transport " + group->facts().transportTo(of) +
                    "). Ranks of one host can map tensors that the backend's allocate_tensor() "
                    "made: register one of these there. Else use put()"});
  }
  return tensorOver(window->mapped(of), window->shape(of), tensor.scalar_type(),
                    window->mapping(of));
}

c10d::WindowAttr TorchWindow::get_attr(int64_t peerRank) {
  (void)checkedRank("get_attr", peerRank);
  return {.access_type = c10d::WindowAccessType::UNIFIED};
}

// Returns the window's group. Throws if it was destroyed or has failed, and in a forked child.
c10::intrusive_ptr<MooncakeBackend> TorchWindow::backend(const char* call) const {
  auto backend = backend_.lock();
  if (!backend)
    throwError({ErrorCode::kAborted, std::string(call) + ": the window's group was destroyed"});
  backend->group().refuseInForkedChild();
  throwIfError(backend->group().group()->usable());
  return backend;
}

TorchWindow::Registered TorchWindow::registered(const char* call) const {
  Lock lock(mutex_);
  if (!registered_.window)
    refuse(std::string(call) +
           ": this window has no tensor; tensor_register() one, on all ranks of the group");
  return registered_;
}

int TorchWindow::checkedRank(const char* call, int64_t rank) const {
  if (rank < 0 || rank >= size_)
    refuse(std::string(call) + ": rank " + std::to_string(rank) + " is not in a group of " +
           std::to_string(size_));
  return int(rank);
}

}  // namespace mooncake

#endif
