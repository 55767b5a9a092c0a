#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/version.h>

#include "backend/abort_hooks.h"
#include "backend/backend_options.h"
#include "backend/c10d_verbs.h"
#include "backend/device_half.h"
#include "backend/group_facts.h"
#include "backend/host_calls.h"
#include "backend/leaving.h"
#include "backend/live_group.h"
#include "backend/message_calls.h"
#include "backend/replacing.h"

// torch has no macro of its own for hooks at the end of an operation.
#if defined(C10D_BACKEND_HAS_HOOKS) && (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15)
#define MOONCAKE_HAS_COMPLETION_HOOKS
#endif

namespace mooncake {

// c10d's face of one group: hands each call to the part that does it.
class MooncakeBackend : public C10dVerbs {
 public:
  // See LiveGroup.
  MooncakeBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                  BackendOptions options, const MooncakeBackend* world);
  ~MooncakeBackend() override;

  LiveGroup& group() { return group_; }
  const LiveGroup& group() const { return group_; }
  const GroupFacts& facts() const { return facts_; }
  HostCalls& host() { return host_; }
  MessageCalls& messages() { return messages_; }
  const MessageCalls& messages() const { return messages_; }
  DeviceHalf& devices() { return *devices_; }
  Leaving& leaving() { return leaving_; }
  Replacing& replacing() { return replacing_; }

  const std::string getBackendName() const override { return group_.options().name; }
  // The options that a split-off group starts with; the copy is the caller's. This function and
  // setTimeout() have no `override`: c10d::Backend has both since torch 2.9 only.
  c10::intrusive_ptr<Options> getBackendOptions();
  c10d::ErrorType getError() override;
  void setTimeout(std::chrono::milliseconds timeout) { group_.setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return facts_.called(); }
  void shutdown() override;
  // Ends everything that is under way with an error.
  void abort() override;
#ifdef C10D_BACKEND_HAS_HOOKS
  bool supportsAbortHooks() const override { return true; }
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override {
    abortHooks_.add(id, std::move(hook));
  }
  void unregisterAbortHook(int64_t id) override { abortHooks_.remove(id); }
#endif
#ifdef MOONCAKE_HAS_COMPLETION_HOOKS
  // The hook is called for collectives, messages, and calls of windows: see CompletionHooks.
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t id) override { group_.hooks()->remove(id); }
#endif
#ifdef C10D_BACKEND_HAS_WINDOW
  bool supportsWindow() const override { return true; }
  // With a tensor, the call is collective and registers the tensor.
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
#endif
  // Allocates a tensor in memory that the ranks of the host can map. This function and the next
  // have no `override`: torch has them in this form since 2.9, or somewhat before. The device index
  // of the CPU is -1.
  at::Tensor allocateTensor(long size, at::TensorOptions options);
  bool supportsTensorAlloc(c10::DeviceIndex index) { return index < 0; }

  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) override {
    host_.monitoredBarrier(opts, waitAllRanks);
  }
  bool supportsCoalescing() const override { return true; }
  // Messages that are called between the two are kept, and then posted together, unless one of them
  // was refused. Collectives begin as always. endCoalescing() returns one work for all calls. Calls
  // of other threads are not part of the batch.
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    return post(c10d::OpType::SEND, tensors, to, tag);
  }
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    return post(c10d::OpType::RECV, tensors, from, tag);
  }
  WorkPtr recvAnysource(std::vector<at::Tensor>& tensors, int tag) override {
    return post(c10d::OpType::RECVANYSOURCE, tensors, PointToPoint::kAnySource, tag);
  }

 private:
  WorkPtr carryOut(Collective call) override;
  Coalescing& batches() override { return group_.batches(); }
  WorkPtr post(c10d::OpType type, const std::vector<at::Tensor>& tensors, int peer, int tag);

  LiveGroup group_;
  const GroupFacts facts_{group_};
  AbortHooks abortHooks_;
  HostCalls host_{group_};
  MessageCalls messages_{group_};
  const std::unique_ptr<DeviceHalf> devices_;  // ends before the group, after Leaving::close()
  Replacing replacing_{group_, *devices_};
  Leaving leaving_;
};

}  // namespace mooncake
