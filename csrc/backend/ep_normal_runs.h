#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "backend/ep_run.h"
#include "base/block_cache.h"
#include "ep/buffer.h"
#include "ep/census.h"

// The calls of the normal mode, see EpNormal.
namespace mooncake {

// The common part.
class NormalRun : public EpRun {
 public:
  Status read() override;

  std::optional<at::Tensor> activeRanks;
  GroupRanks mask;
  std::optional<Clock::duration> patience;
  ep::Ending ending;

 protected:
  template <typename Call>
  void fillIn(Call& call, const Status& inputs, Deadline deadline) const {
    call.inputs = inputs;
    call.mask = mask;
    call.deadline = deadline;
    call.patience = patience;
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
  std::string error;
  std::shared_ptr<BlockCache> memory;  // of the results
  std::optional<size_t> places;        // the results have memory already, for this many rows
  bool zerosOthers = false;            // and the places of ranks that sent nothing become zeros
  std::vector<at::Tensor> given, made;
  at::Tensor sources, ends;

 private:
  void zeroOthers(const std::vector<int64_t>& ranges) const;
  Status makeRoom(Group& group, int64_t rows);
};

// Counts the tokens of all ranks and dispatches them into memory for a number of rows that all
// ranks know ahead.
class WorstRun final : public TokensRun {
 public:
  Status read() override;
  Status run(const ep::Memory& memory, const Status& inputs, Deadline deadline) override;

  const ep::Buffer* buffer = nullptr;  // runs this
  at::Tensor ranks;                    // int32 [tokens][any]
  uint32_t mostRows = 0;
  size_t extras = 0;                     // of a row, for which the combine gets room
  std::shared_ptr<const ep::Handle> of;  // null, or a dispatch that has ended or runs earlier
  // Results, see EpNormal::WorstArguments; and the rows, of Staging::newCounts().
  at::Tensor endsShown, table, participants, usedRows;

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

// Dispatches tokens the way of a WorstRun, which has ended or runs earlier.
class AsWorstRun final : public TokensRun {
 public:
  Status run(const ep::Memory& memory, const Status& inputs, Deadline deadline) override;

  std::shared_ptr<const ep::Handle> first;
  at::Tensor usedRows;
};

class SumsRun final : public NormalRun {
 public:
  Status run(const ep::Memory& memory, const Status& inputs, Deadline deadline) override;

  ep::CombineCall call;
  bool isOfWorst = false;  // the handle is that of a WorstRun, so its facts are read here
  std::vector<float> weights;
  std::vector<at::Tensor> kept;
};

// kInvalidArgument unless each token names ranks of the group, and each once.
Status checkRanks(const at::Tensor& ranks, int size);

}  // namespace mooncake
