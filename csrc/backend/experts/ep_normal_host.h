#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/experts/ep_normal.h"
#include "backend/experts/ep_normal_runs.h"

namespace mooncake {

std::vector<int64_t> countsOf(const ep::Handle& handle);  // by rank: the rows that came from it

// Makes the operations of the normal mode on host memory, see EpNormal. `staging`: of tensors of a
// device; null for CPU tensors, whose values are read here.
class HostTokens {
 public:
  using Tensors = std::vector<at::Tensor>;
  explicit HostTokens(EpBuffer& ours) : ours_(ours), size_(ours.buffer()->group().size()) {}

  // Rows like these, not initialised.
  Tensors newRows(const Tensors& like, int64_t rows, const c10::Device& device) const;
  // `among`: the ranks that may take part; empty: all.
  void setParticipation(NormalRun& run, Staging* staging, const std::vector<bool>& among,
                        const std::optional<at::Tensor>& activeRanks, int64_t timeoutMicros) const;
  // Fills in a dispatch, without places for its results and the ranks of each token.
  void fillIn(TokensRun& run, Staging* staging, const Tensors& fields, int64_t topk, int64_t hidden,
              uint32_t agreed) const;
  // A dispatch of at most `step` tokens of each rank. The rows of rank r go to counts[r] places from
  // begins[r] on. `into`: the fields, and then the sources if they are wanted.
  std::shared_ptr<TokensRun> placedRun(Staging* staging, const Tensors& fields,
                                       const at::Tensor& ranks, int64_t step, int64_t hidden,
                                       const Tensors& into, const std::vector<int64_t>& begins,
                                       const std::vector<int64_t>& counts, uint32_t agreed) const;
  // The rows go to `into` on a device, from the first place on. Only `usedRows` are copied.
  static void placeBounded(TokensRun& run, Staging& staging, const Tensors& into,
                           const at::Tensor& usedRows);
  // An operation that ends with this error on all ranks.
  std::shared_ptr<TokensRun> refusal(const std::string& why) const;
  // The combine of a piece. `mask`: the caller's, or a copy.
  EpBuffer::Call sumsOf(const EpNormal::Combine& given, const EpRoute::Piece& piece,
                        const EpNormal::Combined& made,
                        const std::optional<at::Tensor>& mask) const;

 private:
  EpBuffer& ours_;
  const int size_;
};

}  // namespace mooncake
