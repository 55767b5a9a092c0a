#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "backend/device/staging_streams.h"
#include "backend/experts/ep_kernels.h"
#include "backend/experts/ep_run.h"
#include "backend/experts/ep_work.h"
#include "backend/experts/token_kernels.h"
#include "base/block_cache.h"
#include "base/deadline.h"
#include "base/mutex.h"
#include "base/result.h"
#include "ep/buffer.h"

namespace mooncake {

class EpNormal;
class MooncakeBackend;

// A dispatch, for the combine of its rows.
struct EpHandle {
  std::shared_ptr<ep::Buffer> buffer;
  std::shared_ptr<ep::Handle> dispatch;
  c10::Device device;          // the tensors of the dispatch and of its combines are on it
  std::optional<EpKept> kept;  // of a dispatch by kernels
  // Of a dispatch through host memory: the rows that each expert of this rank received, from the
  // dispatch's end on; in the normal mode all of them, after a bounded dispatch. See
  // Staging::UsedRows.
  at::Tensor usedRows;
};

// Makes the group of a buffer over a group of ours. Collective over the group. Throws.
std::unique_ptr<Group> makeEpGroup(const MooncakeBackend& ours, int size, bool raises,
                                   Deadline deadline);
// The kernels of a buffer of `bytes` over that group. Collective. Throws.
std::shared_ptr<EpKernels> makeEpKernels(const MooncakeBackend& ours, size_t bytes,
                                         EpKernels::Settings settings);
// The same for a buffer of the normal mode.
std::shared_ptr<TokenKernels> makeTokenKernels(const MooncakeBackend& ours, size_t bytes,
                                               TokenKernels::Settings settings);

// Dispatch and combine of tensors over an ep::Buffer. Checks the tensors that callers give, before
// anything is sent, and makes the tensors of the results. Calls with tensors of a device run on
// copies in pinned host memory, see Staging. One thread calls. All functions throw.
class EpBuffer {
 public:
  using Seconds = std::chrono::duration<double>;
  struct Options {
    Seconds timeout{};  // longest time of a call
    bool renormalizes = false;
    bool raises = false;     // mode `raise`
    StreamSettings streams;  // in mode `raise` without words
    bool blocks = false;     // waits for tensors of a device wait on the host
    // Null: tensors of devices go through host memory. A buffer has the kernels of its mode.
    std::shared_ptr<EpKernels> kernels;
    std::shared_ptr<TokenKernels> tokens;
  };
  // A checked call, for submit().
  struct Call {
    std::shared_ptr<EpRun> run;
    std::shared_ptr<Staging> staging;        // null: CPU tensors, which `run` has read
    std::optional<EpKernels::Call> kernels;  // instead of both
    PeerExperts::Limits limits{};            // of `kernels`
    std::byte* kept = nullptr;               // memory of the buffer that holds a dispatch's result
  };
  // The end of the caller's wait.
  enum class Ends {
    kAtOnce,   // when the results are there
    kByEvent,  // EpWork::wait() is called later
    kByHook    // likewise, and kernels receive nothing before that
  };

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
    bool keepsRows;  // false: the next dispatch may overwrite the rows of this one
  };
  // Tensors of ep::DispatchCall. They are filled when the call has ended.
  struct Dispatch {
    at::Tensor rows;
    std::optional<at::Tensor> scales;
    at::Tensor counts, sources, ranges;
    EpHandle handle;
    Call call;
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
    Call call;
  };

  EpBuffer(std::shared_ptr<ep::Buffer> buffer, Options options);
  ~EpBuffer();

  Dispatch dispatch(const DispatchArguments& given);
  Combine combine(const CombineArguments& given);
  // Runs the call, or queues it for the buffer's thread if it ends later. Without Python's lock.
  //
  // `after`: an earlier call that this one continues, or null. If it fails, this call ends with the
  // same error and sends nothing, as on all ranks.
  //
  // Tensors of a device: the call begins where the current stream is now. That stream waits for the
  // results, now or when EpWork::wait() says so. Streams that know words let no
  // caller wait on the host; then a call that fails ends the buffer, because later calls were made
  // before anything could be told.
  std::shared_ptr<EpWork> submit(Call call, Ends ends,
                                 const std::shared_ptr<EpWork>& after = nullptr);
  // Memory for the rows of the next combine. On the CPU it is the memory that other ranks read.
  // Waits until no rank reads or writes there. Without Python's lock.
  at::Tensor nextCombineBuffer(const EpHandle& handle);

  void setExpertOwners(std::vector<int> owners);
  void maskRank(int rank, bool isMasked);
  void unmaskAll();
  // Writes int32 [ranks]: 1 for each rank that this rank masks or that is not in the agreed view.
  // A tensor of a device is written in the order of its current stream. Without Python's lock.
  void showMaskedRanks(const at::Tensor& shown);
  // By rank: in the agreed view. Waits for no device.
  std::vector<bool> activeRanks() const;
  at::Tensor localBuffer() const;
  // The stream of the kernels, or of the copies from and to the device.
  c10::Stream streamOn(const c10::Device& device);
  size_t numBytes() const { return buffer_->bytes(); }
  const std::shared_ptr<ep::Buffer>& buffer() const { return buffer_; }
  // Returns the way of one call's tensors to host memory; null for CPU tensors.
  std::shared_ptr<Staging> stagingFor(const c10::Device& device);
  // Whether streams of the device wait for calls through host memory, and the host does not. Then a
  // call that fails ends the buffer.
  bool usesWords(const c10::Device& device);
  // Memory for the results of calls, see newResult().
  const std::shared_ptr<BlockCache>& results() const { return results_; }
  const std::shared_ptr<TokenKernels>& tokens() const { return options_.tokens; }
  EpNormal& normal() { return *normal_; }
  // The times of a call by kernels.
  PeerExperts::Limits kernelLimits(int64_t timeoutMicros) const;
  // For Operation::skipAfter(). Empty: no rank is skipped before the buffer's timeout.
  std::optional<Clock::duration> patienceOf(int64_t timeoutMicros) const;
  void updateMembers() const;
  // Also frees the memory kept for results. Results that the program has stay valid. Without
  // Python's lock.
  void close(Seconds timeout);

  // Bytes of a buffer for these sizes.
  static size_t sizeHint(size_t maxTokens, size_t hidden, int ranks, int experts);
  static Deadline deadlineIn(Seconds timeout);

 private:
  int rank() const { return buffer_->group().rank(); }
  void checkDispatch(const DispatchArguments& given) const;
  void checkCombine(const CombineArguments& given) const;
  struct RowSizes {
    int64_t local, rows, hidden;
  };
  RowSizes sizesOfRows(const ep::Handle& handle) const;
  Dispatch dispatchByKernels(const DispatchArguments& given, std::shared_ptr<ep::Handle> handle);
  Combine combineByKernels(const CombineArguments& given);
  void makeRows(Dispatch& made, DispatchRun& run);
  void makeStagedRows(Dispatch& made, DispatchRun& run);
  std::function<Status(ep::Memory&)> runOf(Call call) const;
  at::Tensor inMemory(std::byte* data, at::IntArrayRef sizes, at::IntArrayRef strides,
                      at::ScalarType dtype) const;

  const int size_;
  const Options options_;
  const std::shared_ptr<ep::Buffer> buffer_;
  const std::shared_ptr<BlockCache> results_;  // keeps at most as much as the buffer has
  StagingStreams streams_;
  const std::unique_ptr<EpNormal> normal_;
  RecursiveMutex orderMutex_;  // held as CallOrder::mutex()
  // The results of nextCombineBuffer(), until the next combine.
  std::optional<ep::Buffer::NextSend> inPlace_;
  std::optional<at::Tensor> inPlaceOnDevice_;
  bool areRowsPublished_ = false;  // rows on the device are where the kernels publish them
};

}  // namespace mooncake
