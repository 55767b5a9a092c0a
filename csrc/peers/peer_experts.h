#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/result.h"
#include "kernels/ep/arguments.h"
#include "kernels/kernel_id.h"
#include "peers/peer_queue.h"

namespace mooncake {

// Dispatch and combine of a group, as kernels on memory of devices that its ranks map or write to by
// proxies. Rows have the order and the bits of csrc/ep. Each operation is two kernels: one
// sends, and one receives. Addresses are the device's. One thread at a time.
class PeerExperts {
 public:
  using RowKind = kernels::RowKind;

  // `bytes` of rows that a rank publishes for one operation. All other parameters: see
  // PeerQueue::make().
  static Result<std::unique_ptr<PeerExperts>> make(std::unique_ptr<Group> control,
                                                   std::shared_ptr<ViewFeed> view,
                                                   Result<Accelerator*> accelerator,
                                                   DeviceStream stream, size_t bytes,
                                                   std::chrono::milliseconds timeout,
                                                   Deadline deadline);

  // Sizes of a dispatch and its combines. The same on all ranks, except for `local`.
  struct Shape {
    size_t maxTokens = 0;   // most tokens of a rank
    size_t hidden = 0;      // channels of a row
    size_t combineRow = 0;  // bytes of an expert's row in published memory
    unsigned experts = 0;
    unsigned local = 0, mostLocal = 0;  // experts of this rank, and of the rank that has most
    uint32_t owners = 0;                // a hash of the experts' owners
  };

  // Memory that a dispatch and its combines need beside their tensors. The caller allocates it.
  // The owners of experts, as a copy of this reaches the device:
  static std::vector<std::byte> tableOf(std::span<const int> owners, int rank);
  // The facts that a dispatch keeps for its combines:
  size_t keptBytes(const Shape& shape, size_t tokens, size_t topk) const;

  // The caller's part of an operation.
  struct Caller {
    const void* topk = nullptr;  // [tokens][topks] of int64, or of int32
    bool isTopkWide = true;
    size_t tokens = 0, topks = 0;
    const uint64_t* mask = nullptr;  // bits of the ranks that the buffer counts as active
    int32_t* activeRanks = nullptr;  // [ranks], read and written; may be null
    int64_t* waits = nullptr;        // [ranks] of microseconds, added to; may be null
    const std::byte* table = nullptr;
    std::byte* kept = nullptr;
  };
  struct Dispatch {
    Shape shape;
    Caller caller;
    const void* x = nullptr;  // [tokens][hidden] of bfloat16
    RowKind kind = RowKind::kBf16;
    bool packsScales = false;  // UE8M0
    // Results; see ep::DispatchCall.
    void* rows = nullptr;
    void* scales = nullptr;
    int32_t* counts = nullptr;
    int32_t* sources = nullptr;
    int64_t* ranges = nullptr;
    int32_t* addedCounts = nullptr;  // may be null
  };
  struct Combine {
    Shape shape;
    Caller caller;
    const void* x = nullptr;  // [local expert][row][hidden] of bfloat16; null: in nextRows()
    const float* weights = nullptr;
    bool usesLogfmt = false;
    bool renormalizes = false;
    void* sums = nullptr;  // [tokens][hidden] of bfloat16
    bool* missing = nullptr;
  };
  struct Limits {
    Clock::duration most{};       // from receive() to the end, else the group ends
    Clock::duration skipAfter{};  // see PeerQueue::exchange()
  };
  // Enqueue the kernel that sends, and return the call's number; 0 for a call that is recorded into
  // a graph. The operation before it is received first, if it was not. kInvalidArgument: kernels
  // cannot take the call. Nothing was sent.
  Result<uint64_t> send(const Dispatch& dispatch, const Limits& limits);
  Result<uint64_t> send(const Combine& combine, const Limits& limits);
  // Enqueues the kernel that receives the rows of the last operation, unless it was enqueued.
  Status receive();
  // Forgets that operation: it was recorded into a graph, which has ended.
  void drop() { pending_ = nullptr; }
  // Number of the operations that were sent, by graphs too.
  uint64_t sent() const { return sent_; }

  // The rows that the next combine publishes: [local expert][row] of `combineRow` bytes. Null: their
  // place is not known, because graphs have operations of the group. `number`: of that combine's call.
  struct NextRows {
    std::byte* rows = nullptr;
    uint64_t number = 0;
  };
  NextRows nextRows(const Shape& shape) const;

  PeerQueue& queue() const { return *queue_; }
  PeerGuard& guard() const { return queue_->guard(); }

 private:
  explicit PeerExperts(std::unique_ptr<PeerQueue> queue) : queue_(std::move(queue)) {}

  struct Kept;
  Kept keptOf(const Shape& shape, const Caller& caller) const;
  // `bytes` that the rank publishes; at most `inboxBytes` of them are for a rank of another host.
  Status check(const Shape& shape, const Caller& caller, size_t bytes, size_t inboxBytes) const;
  kernels::ExpertCall callOf(const Shape& shape, size_t rowBytes, uint32_t hash,
                             const Limits& limits) const;
  template <typename Send, typename Receive>
  Result<uint64_t> sendAny(const char* name, std::pair<KernelId, KernelId> ids, const Send& send,
                           const Receive& receive, size_t sharedBytes, const Limits& limits);
  size_t ranks() const { return size_t(queue_->group().size()); }

  const std::unique_ptr<PeerQueue> queue_;
  std::function<Status()> pending_;  // receives the last operation; null: that was done
  uint64_t sent_ = 0;
};

}  // namespace mooncake
