#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/deadline.h"
#include "base/result.h"
#include "ep/calls.h"

namespace mooncake {

// One dispatch or combine, with the tensors that it works on: the caller's, or their copies in host
// memory. Keeps them alive. One thread at a time.
class EpRun {
 public:
  virtual ~EpRun() = default;
  // Reads the tensors whose values decide which rows are sent, before run(). kInvalidArgument.
  virtual Status read() = 0;
  // `inputs`: an error if the tensors could not be had or read, see ep::DispatchCall::inputs.
  virtual Status run(const ep::Memory& memory, const Status& inputs, Deadline deadline) = 0;
};

class DispatchRun final : public EpRun {
 public:
  Status read() override;
  Status run(const ep::Memory& memory, const Status& inputs, Deadline deadline) override;

  ep::DispatchCall call;  // without the values and addresses of the tensors below
  int rank = 0;
  at::Tensor x, topk, counts, sources, ranges;
  std::optional<at::Tensor> activeRanks, addedCounts, waits;
  at::Tensor usedRows;           // of Staging::newCounts(), or not defined
  std::vector<at::Tensor> kept;  // the tensors that call.rows and call.scales lie in
};

class CombineRun final : public EpRun {
 public:
  Status read() override;
  Status run(const ep::Memory& memory, const Status& inputs, Deadline deadline) override;

  ep::CombineCall call;  // without the values and addresses of the tensors below
  at::Tensor x;          // not defined if the rows are in the buffer's memory
  at::Tensor topk, weights, sums, missing;
  at::Tensor target;  // receives the sums of a combine that has ended well; may be `sums`
  std::optional<at::Tensor> activeRanks, waits;
};

// Writes the ranks that are masked or lost to int32 [ranks], in the order of a buffer's calls.
class MaskRun final : public EpRun {
 public:
  MaskRun(at::Tensor shown, GroupRanks callerMask)
      : shown_(std::move(shown)), callerMask_(std::move(callerMask)) {}

  Status read() override { return {}; }
  Status run(const ep::Memory& memory, const Status& inputs, Deadline deadline) override;
  void show(const Group& group) const;

 private:
  const at::Tensor shown_;
  const GroupRanks callerMask_;
};

}  // namespace mooncake
