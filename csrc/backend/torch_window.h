#pragma once

#include "backend/mooncake_backend.h"

#ifdef C10D_BACKEND_HAS_WINDOW

#include <memory>

#include <torch/csrc/distributed/c10d/Window.hpp>

#include "base/mutex.h"
#include "collectives/rma_window.h"

namespace mooncake {

// torch's window over an RmaWindow: checks arguments and passes them on. It may outlive its group;
// its calls are refused then. A registered tensor is kept until it is deregistered or the window is
// destroyed, even if `owning` is false: otherwise later puts of other ranks would land in memory
// that has another use.
class TorchWindow final : public c10d::Window {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  explicit TorchWindow(MooncakeBackend& backend);
  ~TorchWindow() override;

  void tensor_register(const at::Tensor& tensor, bool owning) override;
  void tensor_deregister() override;
  WorkPtr put(const at::Tensor& tensor, int64_t dstRank, int64_t targetOffsetNelems, bool asyncOp,
              const c10d::PutOptions& opts) override;
  at::Tensor map_remote_tensor(int64_t rank) override;
  WorkPtr signal(int64_t peerRank, bool asyncOp, const c10d::SignalOptions& opts) override;
  WorkPtr wait_signal(int64_t peerRank, bool asyncOp, const c10d::WaitSignalOptions& opts) override;
  c10d::WindowAttr get_attr(int64_t peerRank) override;

 private:
  // The window and its tensor, copied together: a call uses the pair that it has checked. The
  // members are destroyed in reverse order: first the window, which other ranks put into, then its
  // memory.
  struct Registered {
    at::Tensor tensor;
    std::shared_ptr<RmaWindow> window;
  };

  c10::intrusive_ptr<MooncakeBackend> backend(const char* call) const;
  Registered registered(const char* call) const;
  int checkedRank(const char* call, int64_t rank) const;
  template <typename Post>
  WorkPtr start(MooncakeBackend& backend, bool async, std::shared_ptr<MessageMemory> memory,
                Post&& post);

  const c10::weak_intrusive_ptr<MooncakeBackend> backend_;
  const std::shared_ptr<MessageDriver> messages_;  // the registered window uses it
  const int size_;
  const uint32_t forkGeneration_ = forkGeneration();
  mutable Mutex mutex_;
  Registered registered_ GUARDED_BY(mutex_);
};

}  // namespace mooncake

#endif
