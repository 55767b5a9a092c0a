#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "base/deadline.h"
#include "base/result.h"
#include "kernels/ep/tokens.h"
#include "kernels/kernel_id.h"
#include "peers/peer_queue.h"

namespace mooncake {

// Dispatch and combine of the normal mode, as kernels on memory of devices that the ranks of a host
// map. Rows have the order and the bits of csrc/ep. Addresses are the device's. One thread at a time.
class PeerTokens {
 public:
  // `bytes` of rows that a rank publishes for one piece of an operation. With ranks on several hosts,
  // a dispatch publishes at most `bytes` / ranks. All other parameters: see PeerQueue::make().
  static Result<std::unique_ptr<PeerTokens>> make(std::unique_ptr<Group> control,
                                                  std::shared_ptr<ViewFeed> view,
                                                  Result<Accelerator*> accelerator,
                                                  DeviceStream stream, size_t bytes,
                                                  std::chrono::milliseconds timeout,
                                                  Deadline deadline);

  // Sizes of a dispatch and its combines, the same on all ranks.
  struct Shape {
    std::optional<size_t> mostTokens;  // of a rank; empty: not known, so all go in one piece
    size_t mostRows = 0;               // that a rank receives
    unsigned width = 0;                // most ranks of a token
  };
  // The caller's part of an operation.
  struct Caller {
    size_t tokens = 0;
    const kernels::Choice* choices = nullptr;  // [tokens][width]
    const uint64_t* mask = nullptr;            // bits of ranks: all
    uint64_t among = 0;                        // bits of the ranks that the call counts as active
    int32_t* activeRanks = nullptr;            // [ranks], read and written; may be null
  };
  // See kernels::DispatchTokens.
  struct Dispatch {
    Shape shape;
    Caller caller;
    std::span<const kernels::Field> fields;
    uint32_t agreed = 0;  // any number; the same on all ranks
    const int32_t* counts = nullptr;
    size_t capacity = 0;
    const kernels::Dispatched* earlier = nullptr;
    const int32_t* earlierEnds = nullptr;
    int32_t* sources = nullptr;
    int32_t* ends = nullptr;
    int32_t* table = nullptr;
    kernels::Dispatched* dispatched = nullptr;
  };
  // See kernels::CombineTokens.
  struct Combine {
    Shape shape;
    Caller caller;
    size_t hidden = 0;
    unsigned weightCount = 0;
    const void* x = nullptr;
    const float* weights = nullptr;
    size_t capacity = 0;
    const int32_t* sources = nullptr;
    const int32_t* ends = nullptr;
    const kernels::Dispatched* dispatched = nullptr;
    std::span<const void* const> biases;
    void* sums = nullptr;
    float* weightSums = nullptr;
    bool* missing = nullptr;
  };
  // Enqueue the operation's kernel, and return the call's number. If it has not ended so long after,
  // the group ends. kInvalidArgument: kernels cannot take the call. Nothing was sent.
  Result<uint64_t> dispatch(const Dispatch& dispatch, Clock::duration limit);
  Result<uint64_t> combine(const Combine& combine, Clock::duration limit);
  // Ok if a combine of a dispatch of this shape has room, with `weights` weights of a row.
  Status checkCombine(const Shape& shape, size_t hidden, size_t weights) const;

  PeerQueue& queue() const { return *queue_; }
  PeerGuard& guard() const { return queue_->guard(); }

 private:
  explicit PeerTokens(std::unique_ptr<PeerQueue> queue) : queue_(std::move(queue)) {}

  // The way in which an operation is cut.
  struct Pieces {
    unsigned count;
    size_t step;  // most tokens of a rank in a piece
  };
  Result<Pieces> piecesOf(const Shape& shape, size_t most, const char* what) const;
  Result<Pieces> piecesOfDispatch(const Shape& shape, size_t rowBytes, size_t tokens) const;
  Result<Pieces> piecesOfCombine(const Shape& shape, size_t rowBytes) const;
  // Rows of an operation that have room in `bytes` of published memory, or of an inbox.
  static size_t roomIn(size_t bytes, size_t fixed, size_t each);
  size_t inboxBytes() const;
  kernels::TokenCall callOf(const Shape& shape, const Caller& caller, const Pieces& pieces,
                            kernels::Readers readers, size_t rowBytes, uint32_t hash,
                            Deadline deadline) const;
  template <typename Arguments>
  Result<uint64_t> enqueue(const char* name, KernelId kernel, const Shape& shape,
                           const Arguments& arguments, Deadline deadline);

  const std::unique_ptr<PeerQueue> queue_;
};

}  // namespace mooncake
