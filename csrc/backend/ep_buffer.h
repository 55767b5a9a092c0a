#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/deadline.h"
#include "base/result.h"
#include "ep/buffer.h"

namespace mooncake {

class MooncakeBackend;

// A dispatch or combine that was submitted.
class EpWork {
 public:
  EpWork(std::shared_ptr<ep::Buffer> buffer, std::shared_ptr<ep::Task> task)
      : buffer_(std::move(buffer)), task_(std::move(task)) {}

  bool isCompleted() const { return task_->isDone(); }
  // Throws the error of the call. Without Python's lock.
  void wait();

 private:
  const std::shared_ptr<ep::Buffer> buffer_;
  const std::shared_ptr<ep::Task> task_;
};

// A dispatch, for the combine of its rows.
struct EpHandle {
  std::shared_ptr<ep::Buffer> buffer;
  std::shared_ptr<ep::Handle> dispatch;
};

// Makes the group of a buffer over a group of ours. Collective over the group. Throws.
std::unique_ptr<Group> makeEpGroup(const MooncakeBackend& ours, bool raises, Deadline deadline);

// Dispatch and combine of tensors over an ep::Buffer. Checks the tensors that callers give, before
// anything is sent, and makes the tensors of the results. One thread calls. All functions throw.
class EpBuffer {
 public:
  using Seconds = std::chrono::duration<double>;
  struct Options {
    Seconds timeout{};  // longest time of a call
    bool renormalizes = false;
    bool raises = false;  // mode `raise`
  };
  // A checked call, for submit(). Keeps its tensors alive.
  using Run = std::function<Status(ep::Memory&)>;

  struct DispatchArguments {
    const at::Tensor& x;
    const at::Tensor& topk;
    int64_t maxTokens;
    int numExperts;
    bool usesFp8;
    bool roundsScale;
    bool packsScales;  // UE8M0
    const std::optional<at::Tensor>& activeRanks;
    int64_t timeoutMicros;  // 0 or less: no rank is skipped before the buffer's timeout
    const std::optional<at::Tensor>& addedCounts;
    const std::optional<at::Tensor>& waits;
  };
  // Tensors of ep::DispatchCall. They are filled when `run` has ended.
  struct Dispatch {
    at::Tensor rows;
    std::optional<at::Tensor> scales;
    at::Tensor counts, sources, ranges;
    EpHandle handle;
    Run run;
  };

  struct CombineArguments {
    const at::Tensor& x;
    const at::Tensor& topk;
    const at::Tensor& weights;
    const EpHandle& handle;
    bool usesLogfmt;
    bool zeroCopy;
    const std::optional<at::Tensor>& out;
    const std::optional<at::Tensor>& activeRanks;
    int64_t timeoutMicros;
    const std::optional<at::Tensor>& waits;
  };
  struct Combine {
    at::Tensor sums;
    at::Tensor missing;  // by token: a contribution is missing
    Run run;
  };

  EpBuffer(std::shared_ptr<ep::Buffer> buffer, Options options)
      : size_(buffer->group().size()), options_(options), buffer_(std::move(buffer)) {}

  Dispatch dispatch(const DispatchArguments& given);
  Combine combine(const CombineArguments& given);
  // Runs the call, or with `inBackground` queues it for the buffer's thread. Without Python's lock.
  std::shared_ptr<EpWork> submit(Run run, bool inBackground);
  // Memory for the rows of the next combine. Waits until no rank reads or writes there. Without
  // Python's lock.
  at::Tensor nextCombineBuffer(const EpHandle& handle);

  void setExpertOwners(std::vector<int> owners);
  void maskRank(int rank, bool isMasked);
  void unmaskAll() { buffer_->unmaskAll(); }
  // By rank: masked by this rank, or not in the agreed view.
  std::vector<bool> maskedRanks() const;
  // By rank: in the agreed view.
  std::vector<bool> activeRanks() const;
  at::Tensor localBuffer() const;
  size_t numBytes() const { return buffer_->bytes(); }
  void updateMembers() const;
  // Without Python's lock.
  void close(Seconds timeout);

  // Bytes of a buffer for these sizes.
  static size_t sizeHint(size_t maxTokens, size_t hidden, int ranks, int experts);
  static Deadline deadlineIn(Seconds timeout);

 private:
  int rank() const { return buffer_->group().rank(); }
  GroupRanks mask(const std::optional<at::Tensor>& activeRanks) const;
  std::optional<Clock::duration> patienceOf(int64_t timeoutMicros) const;
  at::Tensor inMemory(std::byte* data, at::IntArrayRef sizes, at::IntArrayRef strides,
                      at::ScalarType dtype) const;

  const int size_;
  const Options options_;
  const std::shared_ptr<ep::Buffer> buffer_;
  std::optional<ep::Buffer::NextSend> inPlace_;
};

}  // namespace mooncake
