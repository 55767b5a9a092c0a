#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "backend/device/kernel_calls.h"
#include "base/deadline.h"
#include "ep/calls.h"
#include "peers/peer_experts.h"

namespace mooncake {

class EpWork;

// Facts that a dispatch by kernels keeps for its combines, in memory of the device.
struct EpKept {
  PeerExperts::Shape shape;
  at::Tensor table;  // the owners of experts
  at::Tensor kept;
};

// The calls of a Buffer with tensors of a device, as kernels, if all ranks can. The ranks decide that
// together, at the first such call. Calls come from one thread. Functions throw.
class EpKernels : public std::enable_shared_from_this<EpKernels> {
 public:
  struct Settings {
    std::string name;  // of the buffer, for the log
    size_t bytes = 0;  // of rows that a rank publishes for one operation
    std::chrono::milliseconds timeout{};
    bool renormalizes = false;
    bool blocks = false;  // wait() waits on the host
  };
  EpKernels(KernelControl control, Settings settings);
  ~EpKernels();

  // Whether calls with tensors of this device go by kernels. Collective, the first time.
  bool takes(const c10::Device& device);
  // Whether calls have gone by kernels on this device.
  bool areOn(const c10::Device& device) const { return experts_ && stream().device() == device; }

  // Sets the ranks that the buffer counts as active, in the order of the current stream. Replays of
  // graphs read them, too.
  void setMask(const GroupRanks& active);

  struct Dispatch {
    at::Tensor x, topk;
    std::optional<at::Tensor> activeRanks, addedCounts, waits;
    ep::RowFormat format;
    bool packsScales;
    at::Tensor rows, counts, sources, ranges;
    std::optional<at::Tensor> scales;  // [local expert][word][row]
  };
  struct Combine {
    at::Tensor x, topk, weights;
    std::optional<at::Tensor> activeRanks, waits;
    bool isInPlace;  // x is nextRows()
    bool usesLogfmt;
    at::Tensor sums, missing;
  };
  // An operation that is to be sent.
  struct Call {
    std::vector<at::Tensor> tensors;
    at::Tensor table;  // the owners of experts
    std::function<Result<uint64_t>(PeerExperts&, const PeerExperts::Limits&)> send;
  };
  // Fills in `kept` for the combines of the dispatch.
  Call dispatch(const Dispatch& given, const ep::Handle& handle, EpKept& kept);
  Call combine(const Combine& given, const EpKept& kept);

  // Enqueues the call behind the current stream's work so far. `isHooked`: wait() of the work enqueues
  // the receiving kernel, and the current stream waits for the sending one. `waits`: the current
  // stream waits for the results. If the current stream is recorded into a graph, so is the call.
  std::shared_ptr<EpWork> submit(Call call, const PeerExperts::Limits& limits, bool isHooked,
                                 bool waits);

  // Enqueues the receiving kernel of the operation that was sent last, behind the current stream's
  // work so far, if it is that one: `sent` is PeerExperts::sent() since then.
  void receive(uint64_t sent);

  // The rows that the next combine publishes, [local expert][row][channel]. Empty: their place is
  // not known, so a combine copies its rows.
  std::optional<at::Tensor> nextRows(const EpKept& kept);

  // The stream of the kernels of calls.
  const c10::Stream& stream() const { return calls_.stream(); }
  // Waits until the kernels of all calls have ended, or for the deadline.
  void close(Deadline deadline);

 private:
  at::Tensor tableFor(const std::shared_ptr<const ep::ExpertMap>& experts);
  PeerExperts::Shape shapeOf(const ep::Handle& handle) const;
  PeerExperts::Caller callerOf(const at::Tensor& topk, const std::optional<at::Tensor>& activeRanks,
                               const std::optional<at::Tensor>& waits, const EpKept& kept) const;

  KernelControl control_;  // until it is decided
  const Settings settings_;
  const int rank_, size_;
  uint64_t maskBits_;
  at::Tensor mask_;  // the same on the device, read by kernels
  KernelCalls calls_;
  std::unique_ptr<PeerExperts> experts_;  // null: calls are staged
  struct Table {
    std::shared_ptr<const ep::ExpertMap> experts;
    at::Tensor onDevice;
  };
  std::deque<Table> tables_;                // the last ones first
  std::vector<at::Tensor> recordedTables_;  // replays read them
  // An operation that is not received yet.
  struct Pending {
    std::vector<at::Tensor> tensors;
    bool isRecorded = false;
  };
  Pending pending_;
  // The combine that nextRows() was called for.
  uint64_t nextNumber_ = 0;
  unsigned nextMostLocal_ = 0;
};

}  // namespace mooncake
