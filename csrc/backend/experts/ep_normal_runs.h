#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "backend/experts/ep_run.h"
#include "ep/buffer.h"
#include "ep/census.h"

// The operations of the normal mode on host memory, see EpNormal.
namespace mooncake {

// The common part.
class NormalRun : public EpRun {
 public:
  Status read() override;

  std::optional<at::Tensor> activeRanks;
  GroupRanks mask;
  std::optional<Clock::duration> patience;
  bool goesOn = false;  // further operations of the call follow
  ep::Ending ending;

 protected:
  template <typename Call>
  void fillIn(Call& call, const Status& inputs, Deadline deadline) const {
    call.inputs = inputs;
    call.mask = mask;
    call.deadline = deadline;
    call.patience = patience;
    call.goesOn = goesOn;
  }
  Status ended(Status status, const ep::Memory& memory) const;
};

class CountRun final : public NormalRun {
 public:
  Status run(const ep::Memory& memory, const Status& inputs, Deadline deadline) override;

  ep::Census census;
};

class TokensRun : public NormalRun {
 public:
  Status run(const ep::Memory& memory, const Status& inputs, Deadline deadline) override;

  ep::DispatchCall call;
  Status refusal;                // not ok: ends the operation on all ranks with this error
  bool zerosOthers = false;      // the places of ranks that sent nothing become zeros
  std::vector<at::Tensor> kept;  // hold the memory of `call`

 private:
  void zeroOthers() const;
};

// Counts the tokens of all ranks, and dispatches them into memory for a number of rows that all
// ranks know ahead.
class BoundedRun final : public TokensRun {
 public:
  Status read() override;
  Status run(const ep::Memory& memory, const Status& inputs, Deadline deadline) override;

  const ep::Buffer* buffer = nullptr;    // runs this
  at::Tensor ranks;                      // int32 [tokens][any]
  size_t weights = 0;                    // of a row, for which the combine gets room
  std::shared_ptr<const ep::Handle> of;  // null, or a dispatch that has ended or runs earlier
  // Results, see EpNormal::Arrived; and the number of rows, of Staging::newCounts().
  at::Tensor ends, table, there, usedRows;

 private:
  // By rank: its tokens, the most rows, the number that must be the same, and the tokens for each.
  static constexpr size_t kTokens = 0, kMostRows = 1, kAgreed = 2, kForRanks = 3;
  Status countAll(const ep::Memory& memory, const Status& inputs, Deadline deadline);
  // Returns an error of all ranks, or sets the shape of the handle.
  Status checkCounts(const Group& group);
  void show(int rank);

  ep::Census census_;
  GroupRanks counted_;
};

// Dispatches tokens the way of a BoundedRun, which has ended or runs earlier.
class BoundedAgainRun final : public TokensRun {
 public:
  Status run(const ep::Memory& memory, const Status& inputs, Deadline deadline) override;

  std::shared_ptr<const ep::Handle> first;
  at::Tensor usedRows;
};

class SumsRun final : public NormalRun {
 public:
  Status run(const ep::Memory& memory, const Status& inputs, Deadline deadline) override;

  ep::CombineCall call;
  bool isBounded = false;  // the handle is a BoundedRun's, so its facts are read here
  std::vector<float> weights;
  std::vector<at::Tensor> kept;
};

// kInvalidArgument unless each token names ranks of the group, and each once.
Status checkRanks(const at::Tensor& ranks, int size);

}  // namespace mooncake
